"""How a transfer is cut."""

from __future__ import annotations

import numpy as np
import pytest

from xferlib.staging.parts import FIRST, LEAST, cut

MIB = 1 << 20


@pytest.mark.parametrize("ways", [1, 2, 8])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("nbytes", [1, 3, FIRST, 5 * MIB + 7, 64 * MIB])
def test_parts_follow_each_other_and_hold_every_byte(nbytes: int, ways: int, begins: bool) -> None:
    array = np.empty(nbytes, np.uint8)
    parts = cut(4096, array, largest=4 * MIB, ways=ways, begins=begins)
    address, start = 4096, array.ctypes.data
    for part in parts:
        (piece,) = part.arrays
        assert (part.address, piece.ctypes.data, part.nbytes) == (address, start, piece.nbytes)
        assert 0 < part.nbytes <= 4 * MIB
        address, start = address + part.nbytes, start + part.nbytes
    assert address == 4096 + nbytes


def test_the_first_parts_grow_and_the_last_ones_shrink() -> None:
    sizes = [part.nbytes for part in cut(0, np.empty(256 * MIB, np.uint8), largest=4 * MIB, ways=8, begins=True)]
    growing = 4 * MIB // FIRST
    assert sizes[:growing] == [FIRST * (number + 1) for number in range(growing)]
    shrinking = sizes[growing:-1]
    assert shrinking == sorted(shrinking, reverse=True)
    assert shrinking[-1] == LEAST


def test_what_follows_another_transfer_is_full_from_the_start() -> None:
    assert cut(0, np.empty(256 * MIB, np.uint8), largest=4 * MIB, ways=8)[0].nbytes == 4 * MIB
