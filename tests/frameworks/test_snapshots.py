"""Copies on the device of many arrays at once, as a save's snapshot has them: smaller ones share memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests.frameworks.kits.every import KITS, given
from tests.frameworks.kits.kit import Kit
from xferlib.byte_reader import Span
from xferlib.conformance import StagerConformance
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

MIB = 1 << 20


@given(*KITS)
def test_each_array_of_a_snapshot_is_as_it_was_whatever_its_size(kit: Kit, laws: StagerConformance, stager: Stager) -> None:
    """Of every size and width in one tree; what is written to the arrays afterwards is not in it."""
    chance = np.random.default_rng(0)
    sizes = [*range(0, 300, 7), 4096, 65_537, 3 * MIB + 1, 4 * MIB, 5 * MIB + 3]
    wanted = [chance.integers(0, 99, size).astype((np.uint8, np.int32, np.float16)[size % 3]) for size in sizes]
    arrays = [laws.from_numpy(values) for values in wanted]
    if not hasattr(stager.backend, "copied"):
        with pytest.raises(CapabilityError, match="copies no arrays"):
            stager.reader(arrays, snapshot=True)
        return
    with stager.reader(arrays, snapshot=True) as reader:
        if stager.capabilities.put_into:
            for array, values in zip(arrays, wanted, strict=True):
                stager.put(values * 0, into=array)
        del arrays
        memory = reader.empty(max(values.nbytes for values in wanted))
        for number, values in enumerate(wanted):
            start = min(3, values.nbytes)
            got = reader.read([Span(number, start, values.nbytes - start)], memory).result()
            assert got.tobytes() == values.tobytes()[start:], number


@given(*KITS)
def test_copies_of_views_are_in_c_order_and_hold_nothing_but_themselves(
    kit: Kit, laws: StagerConformance, stager: Stager, tmp_path: Path
) -> None:
    """Of views that begin anywhere, have gaps, or have no elements, beside arrays that are whole."""
    if not hasattr(stager.backend, "copied"):
        pytest.skip("it copies no arrays")
    values = np.random.default_rng(0).integers(0, 99, (60, 50, 7)).astype(np.float32)
    views: tuple[Any, ...] = (np.s_[:], np.s_[3:9], np.s_[::7, 1:], np.s_[5, ::2], np.s_[0:0], np.s_[1, 2, 3], np.s_[:, 4, 2])
    array = laws.from_numpy(values)
    state = {str(number): array[view] for number, view in enumerate(views * 4)}
    save = xferlib.save(tmp_path / "a.safetensors", state, stager, snapshot=True)
    assert save.held_nbytes == 0
    del array, state
    # What the framework gives out again now must not be what is read.
    others = [laws.from_numpy(values * 0) for _ in range(4)]
    found = safetensors.numpy.load_file(save.result(60))
    for number, view in enumerate(views * 4):
        assert found[str(number)].tobytes() == values[view].tobytes(), view
    del others
