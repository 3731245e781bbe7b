"""Makes this checkout importable from the environment that runs it, with the `raggedfsdp` command beside it."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "python"


def main() -> None:
    Path(sysconfig.get_path("purelib"), "raggedfsdp-checkout.pth").write_text(f"{PACKAGES}\n")
    command = Path(sysconfig.get_path("scripts"), "raggedfsdp")
    command.write_text(f"#!{sys.executable}\nimport sys\n\nfrom raggedfsdp.cli.main import main\n\nsys.exit(main())\n")
    command.chmod(0o755)


if __name__ == "__main__":
    main()
