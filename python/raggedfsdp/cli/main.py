"""`raggedfsdp`: one application, each command registers itself."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from raggedfsdp.cli import plan, train
from raggedfsdp.cli.exits import FAILED, INTERRUPTED, USAGE

app = typer.Typer(
    name="raggedfsdp",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
train.register(app)
plan.register(app)


@app.callback()  # without one, typer drops a command's name while it is the only command
def _about() -> None:
    """Fully sharded training with ragged shards."""


def main() -> NoReturn:
    """Runs a command. An error that has a name is one line; a traceback is left for our own bugs."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this, in silence
            _say("interrupted", INTERRUPTED)
    except (typer.Abort, KeyboardInterrupt):
        code = _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it flushes
        code = FAILED
    except Exception as e:
        code = _explain(e)
        if code is None:
            raise
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int | None:
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own: an unknown option, a value of the wrong kind
        return _say(format_message(), USAGE)
    from raggedfsdp import CommError, UsageError

    if isinstance(error, UsageError):
        return _say(str(error), USAGE)
    return _say(str(error), FAILED) if isinstance(error, (CommError, OSError)) else None


def _say(message: str, code: int) -> int:
    print(f"raggedfsdp: {message}", file=sys.stderr)
    return code
