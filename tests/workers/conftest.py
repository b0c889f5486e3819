"""Rings with few workers, on host memory."""

from __future__ import annotations

import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.workers.fills import Gate
from xferlib.pipeline.workers.shared_ring import SharedRing


@pytest.fixture(autouse=True, scope="session")
def bare_main() -> Iterator[None]:
    """Spawned processes import the main module of their parent again: here the whole of pytest, for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        yield


@pytest.fixture(scope="session")
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20) as opened:
        yield opened


@pytest.fixture(scope="session")
def pair(stager: xferlib.Stager) -> Iterator[SharedRing]:
    """A ring of three slots of 64 integers whose workers stay from test to test."""
    with SharedRing(stager, (64, np.int64), slots=3) as ring:
        yield ring


@pytest.fixture
def ring(stager: xferlib.Stager) -> Iterator[SharedRing]:
    """A ring of its own."""
    with SharedRing(stager, (64, np.int64), slots=3) as ring:
        yield ring


@pytest.fixture
def gate(tmp_path: Path) -> Callable[[int], Gate]:
    """Make a gate by its number."""
    return lambda index: Gate(tmp_path / f"gate{index}").make()


def shared_names() -> set[str]:
    """Return the names of shared memory and semaphores that Python's own modules have given, for any program of this machine.

    Other programs' go again: what stays is what a test has left.
    """
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "wnsm_", "sem.", "pym-", "xferlib"))}


def descriptors() -> Counter[str]:
    """Count what this process has open, by what it is."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found[os.readlink(link).split(":")[0]] += 1
    return found


def first(array: Any) -> int:
    """Return the number with which all of an array is filled."""
    value = int(array.flat[0])
    assert (array == value).all()
    return value
