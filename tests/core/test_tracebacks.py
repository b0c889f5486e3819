"""How many frames of ours stand between the caller's line and the check that refuses what it passed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered

MOST = 3
OURS = (str(Path(xferlib.__file__).parent), "xferlib_")
X = np.zeros(3)
OBJECTS = np.array([object()])

CALLS: dict[str, Callable[[xferlib.Stager], Any]] = {
    "put of no array": lambda s: s.put(object()),
    "put of a tree of none": lambda s: s.put({"a": object()}),
    "put of objects": lambda s: s.put(OBJECTS),
    "put of a tree with objects": lambda s: s.put({"a": X, "b": OBJECTS}),
    "put into another shape": lambda s: s.put(X, into=np.zeros(4)),
    "put into what is no array": lambda s: s.put(X, into="a"),
    "put into another tree": lambda s: s.put({"a": X}, into=[X]),
    "put of a tree into other shapes": lambda s: s.put({"a": X}, into={"a": np.zeros(4)}),
    "put on stream 0": lambda s: s.put(X, stream=0),
    "put on no stream": lambda s: s.put(X, stream="a"),
    "get of no array": lambda s: s.get(object()),
    "get of a tree of none": lambda s: s.get({"a": object()}),
    "get to another shape": lambda s: s.get(X, out=np.zeros(5)),
    "get to what is no array": lambda s: s.get(X, out="s"),
    "get to another tree": lambda s: s.get({"a": X}, out={"b": X}),
    "get on no stream": lambda s: s.get(X, stream="a"),
    "prefetch of what cannot be iterated": lambda s: xferlib.prefetch(3, s),  # type: ignore[call-overload]  # That is the point.
    "prefetch of depth 0": lambda s: xferlib.prefetch([X], s, 0),
    "prefetch on stream 0": lambda s: xferlib.prefetch([X], s, stream=0),
    "prefetch on no stream": lambda s: xferlib.prefetch([X], s, stream="q"),
    "ring of a number": lambda s: xferlib.Ring(s, {"a": 3}),
    "ring of no dtype": lambda s: xferlib.Ring(s, {"a": ((3,), "nope")}),
    "ring of a negative length": lambda s: xferlib.Ring(s, {"a": ((-3,), "f4")}),
    "ring of objects": lambda s: xferlib.Ring(s, ((3,), "O")),
    "pin of no array": lambda s: s.pin("a"),  # type: ignore[arg-type]  # That is the point.
    "pin of a column": lambda s: s.pin(np.zeros((4, 4))[:, 1]),
    "pinned memory of a negative length": lambda s: s.empty_pinned(-3, "f4"),
    "pinned memory of objects": lambda s: s.empty_pinned(3, "O"),
    "pinned memory of no shape": lambda s: s.empty_pinned("a", "f4"),  # type: ignore[arg-type]  # That is the point.
    "stager of no name": lambda s: xferlib.stager("hots"),
    "stager of no device": lambda s: xferlib.stager("host", device=3),
    "stager of no limit": lambda s: xferlib.stager("host", pinned_limit=-1),
    "stager of no staging": lambda s: xferlib.stager("host", staging="x"),
}


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if any(part in frame.filename for part in OURS)]


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_argument_is_refused_a_few_frames_from_the_door(what: str, stager: xferlib.Stager) -> None:
    with pytest.raises((TypeError, ValueError, xferlib.XferError)) as refused:
        CALLS[what](stager)
    assert len(frames(refused.value)) <= MOST, frames(refused.value)
    assert refused.value.__context__ is None or refused.value.__suppress_context__ or refused.value.__cause__ is not None


def test_what_goes_wrong_anywhere_else_keeps_every_frame() -> None:
    # In code that is neither a check of ours nor the backend's.
    broken = eval("lambda *_: 1 + 'a defect'", {"__name__": "framework"})
    with xferlib.stager(tampered(copy_h2d=broken)) as stager, pytest.raises(TypeError, match="unsupported operand") as told:
        stager.put({"x": stager.empty_pinned(3, "f4")})
    assert frames(told.value)[0] == "put"
    assert len(frames(told.value)) > 2
