"""xferlib's own ways, by its public names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.ways import Call, Direction, Way
from xferlib import Stager

__all__ = ["NAME", "fresh", "into", "value"]

NAME = "xferlib"


def into(stager: Stager, direction: Direction, *, pinned: bool) -> Way:
    """Return `put(into=)` or `get(out=)`: the target is there."""

    def put(source: Any, target: Any) -> Call:
        return partial(stager.put, source, into=target)

    def get(source: Any, target: Any) -> Call:
        return partial(stager.get, source, out=target)

    # From pinned memory a direction is first in, first out, so the last transfer answers for all; pageable ones are all asked.
    return Way(
        name=NAME,
        direction=direction,
        bind=put if direction == "h2d" else get,
        synchronize=_synchronize,
        keep=1 if pinned else None,
    )


def fresh(stager: Stager, *, keep: int | None) -> Way:
    """Return `put()`: the target is a new device array."""
    return Way(
        name=NAME,
        direction="h2d",
        bind=lambda source, _: partial(stager.put, source),
        synchronize=_synchronize,
        result=lambda transfer: transfer.result(),
        keep=keep,
    )


def value(stager: Stager, synchronize: Callable[[], None], *, keep: int | None) -> Way:
    """Return `put().value`: a new device array that the current stream may read. `synchronize` waits for that stream."""

    def bind(source: Any, _: Any) -> Call:
        put = stager.put
        return lambda: put(source).value

    return Way(
        name=NAME,
        direction="h2d",
        bind=bind,
        synchronize=lambda _: synchronize(),
        result=lambda array: array,
        keep=keep,
    )


def _synchronize(transfers: Sequence[Any]) -> None:
    for transfer in transfers:
        transfer.synchronize()
