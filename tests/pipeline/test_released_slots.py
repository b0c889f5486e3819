"""Slots that are given back while their arrays are held: by copies that `Slot.put` did not start, or by somebody's variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread
from tests.pipeline.steps import PATIENCE, busy, d2h, h2d, until
from xferlib.pipeline import ring as ring_module

SPEC = {"image": ((4, 3), "float32")}

Start = Callable[[xferlib.Stager, Any], xferlib.Transfer]


def put(stager: xferlib.Stager, tree: Any) -> xferlib.Transfer:
    return stager.put(tree)


def get(stager: xferlib.Stager, tree: Any) -> xferlib.Transfer:
    return stager.get(np.full((4, 3), 7, np.float32), out=tree["image"])


@pytest.mark.parametrize("start", [put, get])
@pytest.mark.parametrize("by", ["release", "block"])
def test_a_slot_that_a_copy_uses_is_not_handed_out_before_it_is_done(stager: xferlib.Stager, start: Start, by: str) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        with held(h2d(stager)) as up, held(d2h(stager)) as down:
            slot = ring.acquire()
            slot["image"][:] = 1
            if by == "block":
                with slot:
                    transfer = start(stager, slot.tree)
            else:
                transfer = start(stager, slot.tree)
                slot.release()
            following = on_thread(ring.acquire)
            until(lambda: busy(ring._waiting))
            with pytest.raises(TimeoutError):
                following.result(0.2)
            up.set()
            down.set()
            following.result(PATIENCE)["image"][:] = 2
        assert transfer.done()
        if start is put:
            assert (transfer.value["image"] == 1).all()


def test_a_slot_is_handed_out_although_somebody_keeps_its_arrays(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        with ring.acquire() as slot:
            kept = slot["image"]
        on_thread(ring.acquire).result(PATIENCE)
        with pytest.raises(ValueError, match="read-only"):
            kept[:] = 1


def test_a_slot_that_nobody_keeps_asks_for_no_copies(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "MemoryUsers", lambda address, nbytes: pytest.fail("it asked"))
    with xferlib.Ring(stager, SPEC, slots=1) as ring, held(h2d(stager)):
        stager.put(stager.empty_pinned(3, np.uint8))
        for _ in range(3):
            with ring.acquire():
                pass
        ring.acquire().release()
        on_thread(ring.acquire).result(PATIENCE)
