"""`python -m raggedfsdp`."""

from __future__ import annotations

from raggedfsdp.cli.main import main

if __name__ == "__main__":
    main()
