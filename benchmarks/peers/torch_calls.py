"""PyTorch's calls: `copy_`, `to`, `cpu`, on tensors over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, final

from benchmarks.steps import Bytes, Compute, Drain, Feed
from benchmarks.ways import Call, Direction, Kind, Peer, Way

__all__ = ["open_peer"]

SHARE = 0.2
"""The share of the steps of a pipeline that are measured for ours."""


def open_peer() -> Peer:
    """Import PyTorch. Raises `ModuleNotFoundError` without it, `RuntimeError` if it was built without CUDA or finds no device."""
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is False")
    return _TorchCalls(torch)


@final
class _TorchCalls:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._gets = torch.cuda.Stream()
        self._side = torch.cuda.Stream()
        self._pinned: list[Any] = []
        # As training loops do it: transfers to the device are on a side stream that is current, not on the legacy default stream.
        torch.cuda.set_stream(torch.cuda.Stream())

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        if kind == "fresh":
            return (self._to(non_blocking=True),)
        if kind == "new":
            return (self._to(non_blocking=False), self._pin_to()) if direction == "h2d" else (self._cpu(),)
        if kind == "untouched":
            return (self._cpu(),)
        if kind == "pinned":
            return (self._copy_in() if direction == "h2d" else self._copy_out(),)
        return (self._to(non_blocking=False),) if direction == "h2d" else (self._copy_out_at_once(), self._cpu())

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        if compute.handle is None:
            return ()
        if kind == "pinned":
            return (self._on_compute_stream(compute), self._on_side_stream(compute, pin=False))
        if kind == "new":
            return (self._on_compute_stream(compute), self._pinning(compute), self._on_side_stream(compute, pin=True))
        return (self._on_compute_stream(compute), self._pinning(compute))

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        return () if kind != "new" or compute.handle is None else (self._cpu_on_a_thread(compute),)

    def _on_compute_stream(self, compute: Compute) -> Feed:
        """As most loops are written."""
        torch, stream = self._torch, self._stream(compute)

        def start(batch: Bytes) -> Any:
            with torch.cuda.stream(stream):
                return self._on_host(batch).to("cuda", non_blocking=True)

        return Feed(name="torch to", start=start, use=compute.adopt, share=SHARE)

    def _pinning(self, compute: Compute) -> Feed:
        torch, stream = self._torch, self._stream(compute)

        def start(batch: Bytes) -> Any:
            with torch.cuda.stream(stream):
                return torch.from_numpy(batch).pin_memory().to("cuda", non_blocking=True)

        return Feed(name="torch pin_memory to", start=start, use=compute.adopt, share=SHARE)

    def _on_side_stream(self, compute: Compute, *, pin: bool) -> Feed:
        """As in a prefetcher that takes care of streams."""
        torch, stream, side = self._torch, self._stream(compute), self._side

        def start(batch: Bytes) -> Any:
            with torch.cuda.stream(side):
                tensor = torch.from_numpy(batch).pin_memory() if pin else self._on_host(batch)
                return tensor.to("cuda", non_blocking=True)

        def use(tensor: Any) -> Any:
            stream.wait_stream(side)
            tensor.record_stream(stream)
            return compute.adopt(tensor)

        name = "torch pin_memory to, side stream" if pin else "torch to, side stream"
        return Feed(name=name, start=start, use=use, share=SHARE)

    def _cpu_on_a_thread(self, compute: Compute) -> Drain:
        torch, stream, writer = self._torch, self._gets, self._stream(compute)
        thread = ThreadPoolExecutor(1, "torch-cpu")

        def take(tensor: Any, made: Any) -> Bytes:
            with torch.cuda.stream(stream):
                stream.wait_event(made)
                values: Bytes = tensor.cpu().numpy()
                return values

        def start(output: Any, _: Bytes) -> Future[Bytes]:
            return thread.submit(take, self._on_device(output), writer.record_event())

        return Drain(name="torch cpu, thread", start=start, finish=lambda taken: taken.result(), share=SHARE)

    def _stream(self, compute: Compute) -> Any:
        return self._torch.cuda.ExternalStream(compute.handle) if compute.handle else self._torch.cuda.default_stream()

    def _copy_in(self) -> Way:
        def bind(source: Any, target: Any) -> Call:
            return partial(self._on_device(target).copy_, self._on_host(source), non_blocking=True)

        return Way(
            name="torch copy_",
            direction="h2d",
            bind=bind,
            synchronize=self._synchronize,
            empty_pinned=self._empty_pinned,
        )

    def _copy_out(self) -> Way:
        """On a stream of its own, or it would queue behind transfers of the other direction."""
        torch, stream = self._torch, self._gets

        def bind(source: Any, target: Any) -> Call:
            copy = partial(self._on_host(target).copy_, self._on_device(source), non_blocking=True)

            def call() -> object:
                with torch.cuda.stream(stream):
                    return copy()

            return call

        return Way(
            name="torch copy_",
            direction="d2h",
            bind=bind,
            synchronize=lambda _: stream.synchronize(),
            empty_pinned=self._empty_pinned,
        )

    def _to(self, *, non_blocking: bool) -> Way:
        def bind(source: Any, _: Any) -> Call:
            return partial(self._on_host(source).to, "cuda", non_blocking=non_blocking)

        return Way(
            name="torch to",
            direction="h2d",
            bind=bind,
            synchronize=self._synchronize,
            waits=not non_blocking,
            result=lambda tensor: tensor,
            keep=None,
            empty_pinned=self._empty_pinned,
        )

    def _pin_to(self) -> Way:
        def bind(source: Any, _: Any) -> Call:
            tensor = self._torch.from_numpy(source)
            return lambda: tensor.pin_memory().to("cuda", non_blocking=True)

        return Way(
            name="torch pin_memory to",
            direction="h2d",
            bind=bind,
            synchronize=self._synchronize,
            result=lambda tensor: tensor,
            keep=None,
        )

    def _copy_out_at_once(self) -> Way:
        def bind(source: Any, target: Any) -> Call:
            return partial(self._torch.from_numpy(target).copy_, self._on_device(source))

        return Way(name="torch copy_", direction="d2h", bind=bind, synchronize=lambda _: None, waits=True)

    def _cpu(self) -> Way:
        return Way(
            name="torch cpu",
            direction="d2h",
            bind=lambda source, _: partial(self._on_device(source).cpu),
            synchronize=lambda _: None,
            result=lambda tensor: tensor.numpy(),
            keep=None,
            waits=True,
        )

    def _synchronize(self, _: Sequence[object]) -> None:
        self._torch.cuda.current_stream().synchronize()

    def _on_device(self, array: Any) -> Any:
        if hasattr(array, "__dlpack__"):
            return self._torch.from_dlpack(array)
        return self._torch.as_tensor(array, device="cuda")

    def _on_host(self, array: Bytes) -> Any:
        """Return a tensor over the same memory; one of PyTorch's own pinned tensors, which it tracks, where it is part of one."""
        address = array.ctypes.data
        for tensor in self._pinned:
            offset = address - tensor.data_ptr()
            if 0 <= offset <= tensor.numel() - array.size:
                return tensor[offset : offset + array.size]
        return self._torch.from_numpy(array)

    def _empty_pinned(self, nbytes: int) -> Bytes:
        tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        self._pinned.append(tensor)
        array: Bytes = tensor.numpy()
        return array
