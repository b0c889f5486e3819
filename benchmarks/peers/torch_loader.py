"""PyTorch's `DataLoader` with worker processes and its thread that pins, and its batches handed to JAX by DLPack.

The same jitted step then computes on them. A PyTorch model would do worse: here the copies are on a stream of PyTorch's, beside
JAX's compute and not in line with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from types import TracebackType
from typing import Any, final

from benchmarks.mapped import Mapped
from benchmarks.steps import Bytes

__all__ = ["TorchLoader"]

TIMEOUT = 120.0
"""Seconds without a batch, after which a worker is taken for dead."""


@dataclass(frozen=True)
class _Items:
    """A dataset of whole batches, so that nothing is collated. The second half of the indices are tensors in shared memory."""

    mapped: Mapped
    shared: list[Any]

    def __getitem__(self, index: int) -> Any:
        if index >= self.mapped.count:
            return self.shared[index - self.mapped.count]
        return import_module("torch").from_numpy(self.mapped.batch(index))


@dataclass
class _Turns:
    """A sampler without end, which starts where it is told."""

    count: int
    first: int = 0

    def __iter__(self) -> Iterator[int]:
        return cycle(range(self.first, self.first + self.count))


@final
class TorchLoader:
    """A loader whose workers live until its `with` block ends. Raises `ModuleNotFoundError` without PyTorch."""

    def __init__(self, batches: Sequence[Bytes], mapped: Mapped, workers: int) -> None:
        self._torch = torch = import_module("torch")
        self._from_dlpack = import_module("jax").dlpack.from_dlpack
        on_gpu = import_module("jax").local_devices()[0].platform == "gpu"
        if on_gpu and not torch.cuda.is_available():
            raise RuntimeError("torch.cuda.is_available() is False")
        self._side = torch.cuda.Stream() if on_gpu else None
        self._turns = _Turns(mapped.count)
        shared = [torch.empty(batch.nbytes, dtype=torch.uint8).share_memory_() for batch in batches]
        for tensor, batch in zip(shared, batches, strict=True):
            tensor.numpy()[...] = batch
        self._loader = torch.utils.data.DataLoader(
            _Items(mapped, shared),
            batch_size=None,
            sampler=self._turns,
            num_workers=workers,
            pin_memory=on_gpu,
            persistent_workers=True,
            # A process that has opened a GPU must not be forked.
            multiprocessing_context="spawn",
            timeout=TIMEOUT,
        )

    def copied(self) -> AbstractContextManager[Iterator[Any]]:
        """Give batches that a worker has copied from ordinary into shared memory: what it sends is always copied there."""
        return self._start(0)

    def shared(self) -> AbstractContextManager[Iterator[Any]]:
        """Give batches that lie in shared memory beforehand: only the thread that pins copies, and the workers copy nothing."""
        return self._start(self._turns.count)

    @contextmanager
    def _start(self, first: int) -> Iterator[Iterator[Any]]:
        self._turns.first = first
        yield map(self._to_jax, iter(self._loader))

    def _to_jax(self, tensor: Any) -> Any:
        if self._side is None:
            return self._from_dlpack(tensor)
        # JAX is told to wait for the stream that is current.
        with self._torch.cuda.stream(self._side):
            return self._from_dlpack(tensor.to("cuda", non_blocking=True))

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The loader keeps its iterator, which ends the workers when it goes.
        del self._loader
