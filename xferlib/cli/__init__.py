"""The command `xferlib`. A failure with a known reason is one line on stderr and exit status 1, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; None: the one in `sys.argv`. Always ends in `SystemExit`."""
    from xferlib.cli.app import app
    from xferlib.errors import UnknownBackendError, XferError

    try:
        app(args=None if arguments is None else list(arguments), prog_name="xferlib")
    except UnknownBackendError as error:
        status, message = 2, str(error)
    except XferError as error:
        status, message = 1, str(error)
    else:
        status, message = 0, ""
    if message:
        print(f"xferlib: {message}", file=sys.stderr)
    raise SystemExit(status)
