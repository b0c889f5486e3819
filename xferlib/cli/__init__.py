"""The command `xferlib`. A failure with a known reason is one line on stderr, never a traceback.

The exit status is then 1, or 2 if the command line or a variable must be changed.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["main"]

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk, or a share of one. (Of a pipe that nobody reads any more Click says nothing, and exits with 1.)"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; None: the one in `sys.argv`. Always ends in `SystemExit`."""
    from xferlib.cli.app import app
    from xferlib.cli.command_error import UsageError
    from xferlib.errors import UnknownBackendError, XferError

    try:
        app(args=None if arguments is None else list(arguments), prog_name="xferlib")
    except (UnknownBackendError, UsageError) as error:
        status, message = 2, str(error)
    except XferError as error:
        status, message = 1, str(error)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        what = "the output" if error.filename is None else repr(error.filename)
        status, message = 1, f"{what} could not be written: {error.strerror}. Make room, or write elsewhere"
    else:
        status, message = 0, ""
    if message:
        print(f"xferlib: {message}", file=sys.stderr)
    raise SystemExit(status)


def _drop_output() -> None:
    """Have what stdout still holds go nowhere, if it cannot be written: the interpreter would try once more, and complain."""
    with suppress(AttributeError, OSError, ValueError):
        try:
            sys.stdout.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.dup2(nothing, sys.stdout.fileno())
            finally:
                os.close(nothing)
