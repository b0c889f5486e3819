"""The loaders that JAX programs use, at their best: each gives device arrays of the same batches, in turn and without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any, TypeAlias

from benchmarks.mapped import Mapped
from benchmarks.peers.torch_loader import TorchLoader
from benchmarks.steps import Bytes

__all__ = ["OPENERS", "Loader", "Loaders", "Work"]

DEPTH = 2
"""Batches that Flax is ahead: its documentation says that this is best on GPUs."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a loader is to give."""

    batches: Sequence[Bytes]
    mapped: Mapped
    """The same, for worker processes."""
    workers: int
    end: ExitStack
    """Closes what is opened once and used by many runs."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    name: str
    open: Callable[[], AbstractContextManager[Iterator[Any]]]
    """Start anew from the first batch."""


Loaders: TypeAlias = Callable[[Work], Sequence[Loader]]
"""Import and set up. Raises whatever its import raises; the run goes on without it."""


def _flax(work: Work) -> Sequence[Loader]:
    """Its batches have a first axis for the devices, here of one."""
    flax = import_module("flax.jax_utils")
    device = _device()

    @contextmanager
    def start() -> Iterator[Iterator[Any]]:
        with closing(flax.prefetch_to_device((batch[None] for batch in cycle(work.batches)), DEPTH, devices=[device])) as arrays:
            yield arrays

    return (Loader(name="flax prefetch_to_device", open=start),)


def _grain(work: Work) -> Sequence[Loader]:
    """Batches as items, so that nothing is collated; both of its prefetching threads, as its `device_put` sets them up."""
    grain = import_module("grain")
    device_put = import_module("grain.experimental").device_put
    data = device_put(grain.MapDataset.source(work.batches).repeat().to_iter_dataset(), _device())

    @contextmanager
    def start() -> Iterator[Iterator[Any]]:
        with closing(iter(data)) as arrays:
            yield arrays

    return (Loader(name="grain device_put", open=start),)


def _torch(work: Work) -> Sequence[Loader]:
    loader = work.end.enter_context(TorchLoader(work.batches, work.mapped, work.workers))
    return (
        Loader(name="torch DataLoader", open=loader.copied),
        Loader(name="torch DataLoader, shared tensors", open=loader.shared),
    )


def _device() -> Any:
    return import_module("jax").local_devices()[0]


OPENERS: Mapping[str, Loaders] = {"flax": _flax, "grain": _grain, "torch": _torch}
