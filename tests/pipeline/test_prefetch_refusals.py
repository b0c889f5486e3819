"""What `prefetch`, and what else takes a stager or batches, refuses: on the spot, or in the batch's place, and in words."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.pipeline.steps import batch, number_of


def test_a_batch_that_cannot_be_put_is_refused_in_its_place(stager: xferlib.Stager) -> None:
    batches = xferlib.prefetch([batch(0), {"x": np.array(["text"])}, batch(2)], stager)
    assert number_of(next(batches)) == 0
    with pytest.raises(TypeError, match="cannot be transferred"):
        next(batches)
    assert [number_of(tree) for tree in batches] == [2]


class Foreign:
    """An array of a library with dtypes of its own."""

    shape = (3,)
    dtype = "foreign.float32"


@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("leaf", [Foreign(), {3}, [1, object()]], ids=["array", "set", "list"])
@pytest.mark.parametrize("good", [0, 2])
def test_what_is_no_array_is_named_with_its_place_and_its_batch(
    stager: xferlib.Stager, leaf: Any, good: int, rewrites: bool
) -> None:
    source = [*map(batch, range(good)), {"x": batch(0)["x"], "label": leaf}]
    with xferlib.prefetch(source, stager, rewrites=rewrites) as batches:
        for _ in range(good):
            next(batches)
        with pytest.raises(TypeError, match="expected a NumPy array") as caught:
            next(batches)
    where, which = caught.value.__notes__
    assert where.startswith("at tree.label")
    assert which == f"in batch {good} of the source, counted from 0"


def test_arguments_are_refused_on_the_spot(stager: xferlib.Stager) -> None:
    with pytest.raises(ValueError, match="depth=0"):
        xferlib.prefetch([], stager, 0)
    with pytest.raises(TypeError, match="iterate"):
        xferlib.prefetch(3, stager)  # type: ignore[call-overload]  # The point of the test.


def test_a_stager_in_the_wrong_place_or_a_name_of_one_is_refused_in_words(stager: xferlib.Stager) -> None:
    wrong: Any = [batch(0)]
    for loop in (xferlib.prefetch, xferlib.drain, partial(xferlib.stream_map, number_of)):
        begin: Any = loop
        with pytest.raises(TypeError, match=r"stager='host': expected a stager\. Open one with xferlib\.stager\('host'\)"):
            begin(wrong, "host")
        with pytest.raises(TypeError, match="The stager comes second"):
            begin(stager, wrong)


def test_a_name_of_a_stager_is_refused_in_words_by_rings_and_drains() -> None:
    spec: Any = {"x": ((4,), np.float32)}
    opened: list[Any] = [xferlib.Drain, partial(xferlib.Ring, spec=spec), partial(xferlib.SharedRing, spec=spec)]
    for make in opened:
        with pytest.raises(TypeError, match=r"stager='host': expected a stager\. Open one with xferlib\.stager\('host'\)"):
            make("host")


def test_a_single_batch_is_not_taken_for_a_source_of_them(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match=r"batches is a dict, .*Pass \[batch\]"):
        xferlib.prefetch(batch(0), stager)
