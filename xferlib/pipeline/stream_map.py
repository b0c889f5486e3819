"""A source, a function and results, all three at once: `prefetch` before the function, and `drain` behind it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final, overload

from xferlib.memory.arrays import Array
from xferlib.pipeline.drained import Drained
from xferlib.pipeline.one_pass import known_length
from xferlib.pipeline.prefetch import Prefetch, prefetch
from xferlib.stager import Stager, check_stager
from xferlib.typed import HasDtype, KeyT, NamedT, Sequences, TreeT

__all__ = ["stream_map"]


@overload
def stream_map(
    fn: Callable[[Any], NamedT],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: None = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[NamedT]: ...
@overload
def stream_map(
    fn: Callable[[Any], dict[KeyT, Any]],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: None = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[dict[KeyT, Any]]: ...
@overload
def stream_map(
    fn: Callable[[Any], Sequences],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: None = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[Any]: ...
@overload
def stream_map(
    fn: Callable[[Any], HasDtype],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: None = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[Array]: ...
@overload
def stream_map(
    fn: Callable[[Any], TreeT],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: None = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[TreeT]: ...
@overload
def stream_map(
    fn: Callable[[Any], Any],
    batches: Iterable[Any],
    stager: Stager,
    depth: int = 2,
    *,
    out: TreeT,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[TreeT]: ...
def stream_map(
    fn: Callable[[Any], Any],
    batches: Iterable[Any],
    stager: Any = None,
    depth: int = 2,
    *,
    out: Any = None,
    rewrites: bool | None = None,
    stream: object | None = None,
) -> Drained[Any]:
    """Iterate `fn` of every batch as host trees, in order: the copies to the device, `fn` and the copies back all run at once.

    For data of any size: only some batches are on the device at a time, as `bill` says. `fn` takes a device tree and returns one;
    it runs on the consumer's thread and should not wait. An exception of the source, of `fn` or of a copy comes out where its
    result would have. `batches` and `rewrites` are those of `prefetch`, `out` that of `drain`, `stream` that of both.
    Results come out typed as by `Stager.get`; what `fn` takes is checked where it is written.
    """
    if not callable(fn):
        raise TypeError(f"fn={reprlib.repr(fn)}: expected a function, before the batches: stream_map(fn, batches, stager)")
    check_stager(stager, batches, comes="third")
    prefetched = prefetch(batches, stager, depth, rewrites=rewrites, stream=stream)
    try:
        # Not of the batches: their own thread may be inside of them by now.
        return Drained(
            _Mapped(fn, prefetched), stager, depth, out=out, length=known_length(prefetched), stream=stream, prefetched=prefetched
        )
    except BaseException:
        prefetched.close()
        raise


@final
class _Mapped(Iterator[Any]):
    """`fn` of every batch, called when it is asked for. Keeps no batch between two steps, and goes on after an exception."""

    def __init__(self, fn: Callable[[Any], Any], prefetched: Prefetch) -> None:
        self._fn = fn
        self._prefetched = prefetched

    def __next__(self) -> Any:
        batch = next(self._prefetched)
        try:
            return self._fn(batch)
        except StopIteration as error:
            # It would end the loop, and nobody would hear why.
            raise RuntimeError("fn raised StopIteration") from error
