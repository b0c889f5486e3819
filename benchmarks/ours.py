"""xferlib's own ways, by its public names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import xferlib
from benchmarks import memory
from benchmarks.peers.state_calls import Loader, State
from benchmarks.steps import Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Way
from xferlib import Stager

__all__ = ["NAME", "drain", "feed", "fresh", "into", "loader", "made", "prefetched", "source", "untouched", "value"]

NAME = "xferlib"


def into(stager: Stager, direction: Direction, *, pinned: bool) -> Way:
    """Return `put(into=)` or `get(out=)`: the target is there."""

    def put(source: Any, target: Any) -> Call:
        return partial(stager.put, source, into=target)

    def get(source: Any, target: Any) -> Call:
        return partial(stager.get, source, out=target)

    # From pinned memory a direction is first in, first out, so the last transfer stands for all. Pageable ones are all asked.
    return Way(
        name=NAME,
        direction=direction,
        bind=put if direction == "h2d" else get,
        synchronize=_synchronize,
        keep=1 if pinned else None,
    )


def fresh(stager: Stager, *, keep: int | None) -> Way:
    """Return `put()`: the target is a new device array, or a list of them for a list of sources."""
    return Way(
        name=NAME,
        direction="h2d",
        bind=lambda source, _: partial(stager.put, source),
        synchronize=_synchronize,
        result=lambda transfer: transfer.result(),
        keep=keep,
    )


def value(stager: Stager, wait: Callable[[Sequence[Any]], None], *, keep: int | None) -> Way:
    """Return `put().value`: a new device array that the current stream may read. `wait` blocks until arrays are done."""

    def bind(source: Any, _: Any) -> Call:
        put = stager.put
        return lambda: put(source).value

    return Way(
        name=NAME,
        direction="h2d",
        bind=bind,
        synchronize=wait,
        result=lambda array: array,
        keep=keep,
        trees=True,
    )


def untouched(stager: Stager) -> Way:
    """Return `get(out=)` into pageable memory that nobody has touched. It is mapped outside the clock, and first written inside."""

    def bind(source: Any, _: Any) -> Call:
        target = memory.empty_pageable(source.nbytes)
        return lambda: (stager.get(source, out=target), target)

    def synchronize(kept: Sequence[Any]) -> None:
        _synchronize([transfer for transfer, _ in kept])

    return Way(name=NAME, direction="d2h", bind=bind, synchronize=synchronize, result=lambda pair: pair[1], keep=None)


def made(stager: Stager) -> Way:
    """Return `get().result()`: the target is a host array that the stager makes."""

    def bind(source: Any, _: Any) -> Call:
        get = stager.get
        return lambda: get(source).result()

    return Way(name=NAME, direction="d2h", bind=bind, synchronize=lambda _: None, result=lambda array: array, keep=None, waits=True)


def feed(stager: Stager, compute: Compute) -> Feed:
    """Return `put()`, started for the stream of the compute."""
    options: dict[str, Any] = {} if compute.stream is None else {"stream": compute.stream}
    return Feed(name=NAME, start=partial(stager.put, **options), use=lambda transfer: transfer.value)


def source(stager: Stager, batches: Sequence[Bytes], compute: Compute) -> Callable[[int], xferlib.Prefetch]:
    """Return a function that prefetches so many of the batches, in turn, for the stream of the compute.

    They are not rewritten, so the copies borrow them.
    """
    return lambda steps: xferlib.prefetch(islice(cycle(batches), steps), stager, rewrites=False, stream=compute.stream)


def prefetched(stager: Stager, compute: Compute, batches: Iterable[Bytes], *, rewrites: bool | None = None) -> xferlib.Prefetch:
    """Prefetch these batches for the stream of the compute. `rewrites`: None is the default."""
    return xferlib.prefetch(batches, stager, rewrites=rewrites, stream=compute.stream)


def drain(stager: Stager, compute: Compute) -> Drain:
    """Return `get(out=)` of outputs that the compute's stream may still be computing."""
    options: dict[str, Any] = {} if compute.stream is None else {"stream": compute.stream}
    return Drain(
        name=NAME,
        start=lambda output, target: stager.get(output, out=target, **options),
        finish=lambda transfer: cast("Bytes", transfer.result()),
    )


def loader(stager: Stager) -> Loader:
    """Return `xferlib.load`."""
    return Loader(
        name=NAME,
        kind="safetensors",
        load=lambda path: cast("State", xferlib.load(path, stager)),
        host=lambda array: stager.get(array).result(),
    )


def _synchronize(transfers: Sequence[Any]) -> None:
    for transfer in transfers:
        transfer.synchronize()
