"""What a command says instead of a traceback."""

from __future__ import annotations

from importlib.util import find_spec

from xferlib.errors import XferError

__all__ = ["CommandError", "UsageError", "require_plot"]

INSTALL_PLOT = 'Install them with: pip install "matplotlib>=3.8" "pillow>=10.3"'


class CommandError(XferError):
    """Raised for input, output or packages that a command cannot work with. The message is all that the user sees."""


class UsageError(CommandError):
    """Raised for a command line, or a variable of ours, that nothing can be done with: exit status 2."""


def require_plot(purpose: str) -> None:
    """Raise `CommandError` unless Pillow and Matplotlib are installed."""
    if find_spec("PIL") is None or find_spec("matplotlib") is None:
        raise CommandError(f"{purpose} needs Pillow and Matplotlib. {INSTALL_PLOT}")
