"""Counts and sizes as messages have them."""

from __future__ import annotations

import pytest

from xferlib.words import counted, in_words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 70, "1024.0 EiB"),
    ],
)
def test_a_size_is_said_in_the_largest_unit_of_which_there_is_one(nbytes: int, text: str) -> None:
    assert in_words(nbytes) == text


def test_one_is_one() -> None:
    assert [counted(number, "slot") for number in (0, 1, 2, 1234)] == ["0 slots", "1 slot", "2 slots", "1,234 slots"]
    assert [counted(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]
