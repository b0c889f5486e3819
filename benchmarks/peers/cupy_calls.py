"""CuPy's own calls: `ndarray.set`, `ndarray.get`, `asarray`, `asnumpy`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, final

import cupy
import numpy as np

from benchmarks.steps import OUTPUTS, Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]

SHARE = 0.2
"""The share of the steps of a pipeline that are measured for ours."""


def open_peer() -> Peer:
    """Return the peer, with a stream per direction."""
    return _CupyCalls()


@final
class _CupyCalls:
    def __init__(self) -> None:
        self._puts = cupy.cuda.Stream(non_blocking=True)
        self._gets = cupy.cuda.Stream(non_blocking=True)

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind == "fresh":
            return (_asarray(),)
        if kind == "new":
            return (_asarray() if direction == "h2d" else _asnumpy(),)
        if kind == "untouched":
            return (_asnumpy(),)
        if kind == "pinned":
            return (self._set() if direction == "h2d" else self._get(),)
        return (self._set(), _asarray()) if direction == "h2d" else (self._get(), _asnumpy())

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        """A stream of its own and an event for each batch, over four device arrays in turn."""
        if compute.handle is None:
            return ()
        reader, stream = _stream(compute.handle), self._puts
        targets: deque[Any] = deque()

        def start(batch: Bytes) -> tuple[Any, Any]:
            if len(targets) < OUTPUTS:
                targets.append(cupy.empty(batch.nbytes, np.uint8))
            targets.rotate()
            targets[0].set(batch, stream)
            return targets[0], stream.record()

        def use(started: tuple[Any, Any]) -> Any:
            target, event = started
            reader.wait_event(event)
            return compute.adopt(target)

        return (Feed(name="cupy set(stream)", start=start, use=use, share=SHARE),)

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        if compute.handle is None:
            return ()
        writer, stream = _stream(compute.handle), self._gets
        if kind == "new":
            return (_asnumpy_on_a_thread(writer, stream),)

        def start(output: Any, target: Bytes) -> tuple[Bytes, Any]:
            stream.wait_event(writer.record())
            _mine(output).get(stream=stream, out=target, blocking=False)
            return target, stream.record(cupy.cuda.Event(block=True, disable_timing=True))

        def finish(started: tuple[Bytes, Any]) -> Bytes:
            target, event = started
            event.synchronize()
            return target

        return (Drain(name="cupy get(stream, out)", start=start, finish=finish, share=SHARE),)

    def _set(self) -> Way:
        stream = self._puts

        def bind(source: Any, target: Any) -> Call:
            return partial(_mine(target).set, source, stream)

        return Way(name="cupy set", direction="h2d", bind=bind, synchronize=lambda _: stream.synchronize())

    def _get(self) -> Way:
        stream = self._gets

        def bind(source: Any, target: Any) -> Call:
            return partial(_mine(source).get, stream=stream, out=target, blocking=False)

        return Way(name="cupy get(out=)", direction="d2h", bind=bind, synchronize=lambda _: stream.synchronize())


def _stream(handle: int) -> Any:
    return cupy.cuda.ExternalStream(handle) if handle else cupy.cuda.Stream.null


def _mine(array: Any) -> Any:
    """Return CuPy's array over the same memory."""
    return array if isinstance(array, cupy.ndarray) else cupy.asarray(array)


def _asarray() -> Way:
    return Way(
        name="cupy asarray",
        direction="h2d",
        bind=lambda source, _: partial(cupy.asarray, source),
        synchronize=lambda _: cupy.cuda.get_current_stream().synchronize(),
        result=_itself,
        keep=None,
    )


def _asnumpy() -> Way:
    return Way(
        name="cupy asnumpy",
        direction="d2h",
        bind=lambda source, _: partial(cupy.asnumpy, _mine(source)),
        synchronize=lambda _: None,
        result=_itself,
        keep=None,
        waits=True,
    )


def _asnumpy_on_a_thread(writer: Any, stream: Any) -> Drain:
    thread = ThreadPoolExecutor(1, "cupy-asnumpy")

    def take(output: Any, made: Any) -> Bytes:
        stream.wait_event(made)
        values: Bytes = cupy.asnumpy(output, stream=stream)
        return values

    def start(output: Any, _: Bytes) -> Future[Bytes]:
        return thread.submit(take, _mine(output), writer.record())

    return Drain(name="cupy asnumpy, thread", start=start, finish=lambda taken: taken.result(), share=SHARE)


def _itself(array: Any) -> Any:
    return array
