"""What stands for memory, threads or work under way is not copied: it says so, says what to do, and stays as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import pytest

import xferlib

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of a dict": lambda thing: copy.deepcopy({"it": thing}),
    **{f"pickle {protocol}": partial(pickle.dumps, protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
}


def things(stager: xferlib.Stager, steps: ExitStack) -> dict[str, tuple[Any, str]]:
    """Return one of each, and what its refusal advises."""
    ring = steps.enter_context(xferlib.Ring(stager, (8, np.uint8)))
    shared = steps.enter_context(xferlib.SharedRing(stager, (8, np.uint8), slots=2))
    return {
        "stager": (stager, "Threads may share it; another process opens one"),
        "put": (stager.put(np.ones(8, np.uint8)), "Copy its arrays"),
        "get": (stager.get(np.ones(8, np.uint8)), "Copy its arrays"),
        "pin": (steps.enter_context(closing(stager.pin(np.ones(1 << 16, np.uint8)))), "another process pins its memory itself"),
        "ring": (ring, "another process makes one"),
        "slot": (steps.enter_context(ring.acquire()), "acquire another"),
        "shared ring": (shared, "another process makes one"),
        "run": (shared.run(np.copyto, []), r"Begin another with SharedRing.run"),
        "prefetch": (steps.enter_context(xferlib.prefetch([np.ones(8)], stager)), r"Begin another with xferlib.prefetch"),
        "host tree": (steps.enter_context(xferlib.HostTree({"a": np.ones(8)}, stager)), "Copy what its groups hold"),
        "drain": (steps.enter_context(xferlib.Drain(stager)), "Make another"),
        "drained": (steps.enter_context(xferlib.drain([], stager)), r"Begin another with xferlib.drain"),
    }


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_is_refused_in_words_and_stays_as_it_was(stager: xferlib.Stager, way: Callable[[Any], Any]) -> None:
    with ExitStack() as steps:
        for thing, advice in things(stager, steps).values():
            with pytest.raises(TypeError, match=rf"cannot be copied or pickled\. .*{advice}"):
                way(thing)
    assert (stager.put(np.ones(3)).result() == 1).all()


def test_arrays_are_copied_as_ever(stager: xferlib.Stager) -> None:
    for array in (stager.empty_pinned(8, np.uint8), stager.put(np.ones(8, np.uint8)).result()):
        array[:] = 3
        for way in (copy.copy, copy.deepcopy, lambda array: pickle.loads(pickle.dumps(array))):
            assert (way(array) == 3).all()  # type: ignore[no-untyped-call]
