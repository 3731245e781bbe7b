"""Exit codes of every command."""

from __future__ import annotations

FAILED = 1  # a rank or a device failed, or we did
USAGE = 2  # what came in was wrong
UNLIKE = 3  # --verify found a difference beyond its tolerance
INTERRUPTED = 130
