"""Finalizers that transfer, collected at any allocation of a call: they do, or are refused in words where JAX could not bear it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import xferlib_jax
from jax.sharding import SingleDeviceSharding
from xferlib_jax._arrays import FINALIZERS

import xferlib
from tests.core.fakes import WATCHDOG, on_thread
from tests.core.garbage import at_every_allocation, collected_when_told  # noqa: F401  # A fixture for each test.
from xferlib.stager import Stager

MIB = 1 << 20


@pytest.mark.parametrize("call", ["put", "tree", "borrowed put", "get"])
@pytest.mark.parametrize("act", ["put", "borrowed put", "get"])
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_finalizers_that_transfer_run_at_any_allocation(call: str, act: str, stager: Stager) -> None:
    sizes = itertools.count(3000, 700)
    small, large = (np.arange(nbytes // 4, dtype=np.int32) for nbytes in (128, 2 * MIB))
    there = stager.put(small).result()
    acts: dict[str, Callable[[], object]] = {
        "put": lambda: stager.put(np.zeros(next(sizes), np.uint8)).result(),
        "tree": lambda: stager.put({"a": small, "b": small[:8]}).result(),
        "borrowed put": lambda: stager.put(large, borrow=True).result(),
        "get": lambda: stager.get(there).result(),
    }
    for known in acts.values():
        known()
    met = on_thread(lambda: at_every_allocation(acts[call], acts[act])).result(3 * WATCHDOG)
    came = [outcome for outcome in met if outcome != "begun" and not outcome.startswith("call")]
    assert len(came) == met.count("begun") >= 2
    if stager.capabilities.finalizers:
        assert "done" in came
    else:
        assert all("in a finalizer that the garbage collector runs" in outcome for outcome in came)
    assert (stager.get(stager.put(large).result()).result() == large).all()


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_finalizer_makes_no_arrays_where_jax_could_not_bear_it(stager: Stager, count: int) -> None:
    sources = [stager.empty_pinned((300,), np.float32) for _ in range(count)]
    for number, source in enumerate(sources):
        source[:] = number
    unmade, made = stager.put(sources), stager.put(sources)
    known = made.value
    got: list[object] = []

    class Garbage:
        def __init__(self, transfer: xferlib.Transfer) -> None:
            self.me = self
            self.transfer = transfer

        def __del__(self) -> None:
            try:
                got.append(self.transfer.value)
            except xferlib.CapabilityError as error:
                got.append(str(error))

    Garbage(made)
    gc.collect()
    assert got[0] is known
    Garbage(unmade)
    gc.collect()
    if not FINALIZERS:
        assert "in a finalizer that the garbage collector runs" in str(got[1])
    # Refused there and then, and the copy is as sound as before.
    for array, source in zip(unmade.value, sources, strict=True):
        assert (np.asarray(array) == source).all()


@pytest.mark.skipif(FINALIZERS, reason="finalizers may call JAX here")
def test_what_is_over_devices_is_refused_in_finalizers_and_goes_on_behind_them(stager: Stager, tmp_path: Path) -> None:
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    array = jax.device_put(np.zeros(3, np.float32), sharding)
    told: list[str] = []

    class Garbage:
        def __init__(self, act: Callable[[], object]) -> None:
            self.me = self
            self.act = act

        def __del__(self) -> None:
            try:
                self.act()
            except xferlib.CapabilityError as error:
                told.append(str(error))

    with xferlib_jax.prefetch([np.full(3, number, np.float32) for number in range(3)], sharding, stagers=[stager]) as loop:
        assert next(loop)[0] == 0
        Garbage(lambda: next(loop))
        Garbage(lambda: xferlib_jax.prefetch([np.zeros(3, np.float32)], sharding, stagers=[stager]))
        # Before it looks at stagers, or asks JAX anything.
        Garbage(lambda: xferlib_jax.save(tmp_path / "a.npy", array, stagers=[]))
        gc.collect()
        assert len(told) == 3
        assert all("in a finalizer that the garbage collector runs" in words for words in told)
        assert [batch[0] for batch in loop] == [1, 2]
