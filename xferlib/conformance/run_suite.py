"""Run the suite for an installed backend: what `xferlib conformance NAME` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from xferlib.errors import CapabilityError
from xferlib.registry import backend_module

__all__ = ["run"]

HANG_SECONDS = 300
"""A setup, test or teardown that takes longer ends the run with a traceback of every thread: each hold was given up long ago."""


def run(name: str, arguments: Sequence[str] = ()) -> int:
    """Run the hooks that the backend ships, with pytest and these arguments of pytest's, and return pytest's exit status.

    Raises `UnknownBackendError`, or `CapabilityError` if the backend ships no hooks.
    """
    module = backend_module(name, "conformance")
    if module is None or module.__file__ is None:
        raise CapabilityError(f"backend {name!r} ships no hooks to test it with: no module 'conformance' beside its entry point")
    root = os.path.dirname(module.__file__)
    # In a process of its own, where pytest can rewrite the assertions of everything that is imported. Without the configuration of
    # the project in which this is called.
    return subprocess.call(
        [
            *(sys.executable, "-m", "pytest"),
            *("-c", os.devnull, "--rootdir", root, "-p", "no:cacheprovider", "-ra"),
            *("-p", "xferlib.conformance.guard", "-o", f"hang_seconds={HANG_SECONDS}", "-o", "xfail_strict=true"),
            *("-p", "xferlib.conformance.plugin", "--xferlib-backend", name),
            *("--pyargs", module.__name__),
            *arguments,
        ]
    )
