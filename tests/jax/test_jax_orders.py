"""What our stream waits for before the event of a fresh block, and of a fence, is recorded: a played driver stands for a GPU's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax.test_jax_imports import Driver
from xferlib.stager import Stager

jax = pytest.importorskip("jax")

STREAM = 77


class Played:
    """Notes what was exported, and what was recorded, on which stream."""

    def __init__(self, device: Any) -> None:
        from xferlib_jax._exports import exporter

        self.order: list[tuple[str, int | None]] = []
        self.arrays: list[Any] = []
        self._export = exporter(device)

    def export(self, array: Any, stream: int | None = None) -> Any:
        self.order.append(("export", stream))
        self.arrays.append(array)
        return self._export(array)

    def record(self, stream: int) -> Any:
        from xferlib_jax._events import CudaEvent

        self.order.append(("record", stream))
        return CudaEvent(7, Driver())  # type: ignore[arg-type]  # Nothing is asked of it.


def test_a_fresh_block_is_ready_behind_what_jax_may_still_do_with_its_memory(stager: Stager) -> None:
    from xferlib_jax._blocks import BlockMaker

    device = jax.devices()[0]
    played: Any = Played(device)
    maker = BlockMaker(device, STREAM, played, played.export)
    block = maker.make(512)
    assert played.order == [("export", STREAM), ("record", STREAM)]
    assert played.arrays[0].unsafe_buffer_pointer() == block.address
    maker.free(block)


def test_a_fence_is_behind_what_was_computed_for_it(stager: Stager) -> None:
    from xferlib_jax._fence import Fences

    device = jax.devices()[0]
    played: Any = Played(device)
    fences = Fences(device, STREAM, played, played.export)
    before = len(played.order)
    fences._token.delete()
    for _ in range(2):
        fences.make()
        assert played.order[before:] == [("export", STREAM), ("record", STREAM)]
        assert played.arrays[-1] is not fences._token
        before = len(played.order)
