"""What arrays may outlive, and that a hundred thousand transfers leave nothing behind.

Whatever counts the driver's memory is not asked of JAX, which takes it in one piece: its own tests look at its pool.
"""

from __future__ import annotations

import gc
import time
from typing import Any, NamedTuple, cast

import psutil
import pytest

from tests.frameworks.kits.every import CUDA_KITS, given
from tests.frameworks.kits.kit import Kit
from xferlib.conformance import StagerConformance, cuda
from xferlib.conformance.values import assert_same, words
from xferlib.stager import Stager

PUTS = 100_000
WARM_UP = 5_000
IN_FLIGHT = 64
SMALL_NBYTES = 64
BLOCK_NBYTES = 256
"""What a block for a small put takes."""
SLACK_NBYTES = 4 << 20
"""Less than a hundred thousand of anything."""
BACK_WITHIN_SECONDS = 1.0


class Footprint(NamedTuple):
    device_free_nbytes: int
    device_nbytes: int
    events: int
    resident_nbytes: int


def footprint(stager: Stager) -> Footprint:
    gc.collect()
    backend = cast("Any", stager.backend)
    return Footprint(
        cuda.device_free_nbytes(), stager.stats().device_nbytes, len(backend._events.handles), psutil.Process().memory_info().rss
    )


@pytest.mark.alone
@given(*CUDA_KITS)
@pytest.mark.parametrize("use", ["dropped", "waited_for_by_a_stream", "into_an_array"])
def test_a_hundred_thousand_small_puts_leave_nothing_behind(laws: StagerConformance, stager: Stager, use: str) -> None:
    source = laws.pinned(stager, words(1, SMALL_NBYTES))
    into = laws.from_numpy(words(2, SMALL_NBYTES)) if use == "into_an_array" else None

    def put(count: int) -> None:
        for turn in range(count):
            transfer = stager.put(source, into=into)
            if use == "waited_for_by_a_stream":
                transfer.stream_wait()
            if turn % IN_FLIGHT == 0:
                transfer.synchronize()
        transfer.synchronize()

    put(WARM_UP)
    before = footprint(stager)
    put(PUTS)
    after = footprint(stager)
    assert before.device_free_nbytes - after.device_free_nbytes <= SLACK_NBYTES
    assert after.device_nbytes - before.device_nbytes <= IN_FLIGHT * BLOCK_NBYTES
    assert after.events - before.events <= 8 * IN_FLIGHT
    assert after.resident_nbytes - before.resident_nbytes <= SLACK_NBYTES


def test_views_and_aliases_outlive_transfer_batch_and_stager(kit: Kit, laws: StagerConformance, stager: Stager) -> None:
    values = [words(seed) for seed in range(3)]
    with laws.new_stager() as own:
        batch = own.put([laws.pinned(own, value) for value in values]).result()
        kept = dict(laws.aliases(batch[1]))
        del batch
    gc.collect()
    want = {name: laws.to_numpy(alias) for name, alias in kept.items()}
    assert_same(want[kit.whole_alias], values[1])
    others = [laws.put_others(stager, words(9)), stager.put([words(seed) for seed in (10, 11, 12)]).result()]
    for name, alias in kept.items():
        assert_same(laws.to_numpy(alias), want[name])
    del others


@pytest.mark.alone
@given(*CUDA_KITS)
def test_memory_is_freed_with_the_last_view_of_a_closed_stager(laws: StagerConformance, stager: Stager) -> None:
    # CUDA hands small requests out of larger pieces: this one is a piece of its own.
    values = words(1, 64 << 20)
    with laws.new_stager() as own:
        # Kept, so that nothing but the large one is freed with the stager.
        small = laws.put_values(own, words(1))
        gc.collect()
        before = cuda.device_free_nbytes()
        view = laws.put_values(own, values)[5:]
        taken = before - cuda.device_free_nbytes()
        assert taken >= values.nbytes
    gc.collect()
    held = cuda.device_free_nbytes()
    assert before - held >= values.nbytes
    assert_same(laws.to_numpy(view), values[5:])
    del view
    # By nobody's call.
    deadline = time.monotonic() + BACK_WITHIN_SECONDS
    while cuda.device_free_nbytes() - held < values.nbytes:
        assert time.monotonic() < deadline, "the memory is not back"
        time.sleep(0.01)
    assert before - cuda.device_free_nbytes() < values.nbytes
    del small
