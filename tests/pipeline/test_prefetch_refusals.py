"""What `prefetch`, and what else takes a stager or batches, refuses: on the spot, or in the batch's place, and in words."""

from __future__ import annotations

import threading
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


class Failing:
    """A source that can go on behind what it raises."""

    def __init__(self, fails_at: int, error: BaseException) -> None:
        self.asked = 0
        self.fails_at = fails_at
        self.error = error

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> Any:
        number = self.asked
        self.asked += 1
        if number == self.fails_at:
            raise self.error
        if number > self.fails_at + 1:
            raise StopIteration
        return batch(number)


class Sealed(KeyError):
    """An error that takes no notes."""

    def add_note(self, note: str) -> None:
        raise TypeError(note)


@pytest.mark.parametrize("error", [KeyError("gone"), OSError(5, "disk"), Sealed("gone")], ids=lambda error: type(error).__name__)
def test_what_the_source_raises_carries_the_number_of_its_batch_and_stays_what_it_is(
    stager: xferlib.Stager, error: Exception
) -> None:
    with xferlib.prefetch(Failing(17, error), stager) as batches:
        assert [number_of(next(batches)) for _ in range(17)] == list(range(17))
        with pytest.raises(type(error)) as caught:
            next(batches)
        assert [number_of(tree) for tree in batches] == [18]
    assert caught.value is error
    expected = [] if isinstance(error, Sealed) else ["in batch 17 of the source, counted from 0"]
    assert getattr(error, "__notes__", []) == expected


def test_arguments_are_refused_on_the_spot(stager: xferlib.Stager) -> None:
    with pytest.raises(ValueError, match="depth=0"):
        xferlib.prefetch([], stager, 0)
    with pytest.raises(TypeError, match="iterate"):
        xferlib.prefetch(3, stager)  # type: ignore[call-overload]  # The point of the test.


def test_a_stager_in_the_wrong_place_or_a_name_of_one_is_refused_in_words(stager: xferlib.Stager) -> None:
    wrong: Any = [batch(0)]
    for loop, place in ((xferlib.prefetch, "second"), (xferlib.drain, "second"), (partial(xferlib.stream_map, number_of), "third")):
        begin: Any = loop
        with pytest.raises(TypeError, match=r"stager='host': expected a stager\. Open one with xferlib\.stager\('host'\)"):
            begin(wrong, "host")
        with pytest.raises(TypeError, match=r'stager=None: expected a stager\. Open one with xferlib\.stager\("auto"\)'):
            begin(wrong)
        with pytest.raises(TypeError, match=f"The stager comes {place}"):
            begin(stager, wrong)
    for ring in (xferlib.Ring, xferlib.SharedRing):
        make: Any = ring
        with pytest.raises(TypeError, match=r"stager=.*: expected a stager\. The stager comes first"):
            make({"x": ((4,), np.float32)}, stager)


def test_a_function_that_makes_batches_is_to_be_called(stager: xferlib.Stager) -> None:
    def batches() -> Any:
        yield batch(0)

    def identity(tree: Any) -> Any:
        return tree

    wrong: Any = batches
    for begin in (xferlib.prefetch, xferlib.drain, partial(xferlib.stream_map, identity)):
        with pytest.raises(TypeError, match=r"expected something to iterate, got <function.*call it, as in batches\(\)"):
            begin(wrong, stager)
    with pytest.raises(TypeError, match=r"results: expected something to iterate, got 3$"):
        xferlib.drain(3, stager)  # type: ignore[call-overload]  # The point of the test.
    with pytest.raises(TypeError, match=r"fn=<generator.*expected a function, before the batches"):
        xferlib.stream_map(batches(), identity, stager)  # type: ignore[call-overload]  # The point of the test.


def test_a_transfer_is_no_source_and_is_refused_at_the_call(stager: xferlib.Stager) -> None:
    transfer: Any = stager.put(np.zeros(3))
    threads = threading.active_count()
    for begin in (xferlib.prefetch, xferlib.drain, partial(xferlib.stream_map, number_of)):
        with pytest.raises(
            TypeError, match=r"^\w+: expected something to iterate, .* got a transfer: .* Take its arrays with \.value"
        ):
            begin(transfer, stager)
    with xferlib.Ring(stager, ((3,), np.float64)) as ring, pytest.raises(TypeError, match=r"^items: .* got a transfer"):
        ring.collate(transfer)
    assert threading.active_count() == threads


def test_a_name_of_a_stager_is_refused_in_words_by_rings_and_drains() -> None:
    spec: Any = {"x": ((4,), np.float32)}
    opened: list[Any] = [xferlib.Drain, partial(xferlib.Ring, spec=spec), partial(xferlib.SharedRing, spec=spec)]
    for make in opened:
        with pytest.raises(TypeError, match=r"stager='host': expected a stager\. Open one with xferlib\.stager\('host'\)"):
            make("host")


def test_a_single_batch_is_not_taken_for_a_source_of_them(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match=r"batches is a dict, .*Pass \[batch\]"):
        xferlib.prefetch(batch(0), stager)


def test_a_generator_that_has_ended_is_told_of_at_the_callers_line(stager: xferlib.Stager) -> None:
    def batches() -> Any:
        yield batch(0)

    def identity(tree: Any) -> Any:
        return tree

    generator = batches()
    assert [number_of(tree) for tree in xferlib.prefetch(generator, stager)] == [0]
    for begin, name in (
        (xferlib.prefetch, "batches"),
        (xferlib.drain, "results"),
        (partial(xferlib.stream_map, identity), "batches"),
    ):
        with pytest.warns(RuntimeWarning, match=rf"{name}: this generator has ended.*as in batches\(\)") as told:
            loop: Any = begin(generator, stager)
        assert told[0].filename == __file__
        assert list(loop) == []
    # Nothing to be told of: one that is not begun, and sources that begin anew.
    for source in (batches(), [batch(0)]):
        assert len(list(xferlib.prefetch(source, stager))) == 1


@pytest.mark.parametrize(
    "begin",
    [
        lambda stager: xferlib.prefetch([np.zeros(3)], stager),
        lambda stager: xferlib.drain([np.zeros(3)], stager),
        lambda stager: xferlib.stream_map(lambda array: array, [np.zeros(3)], stager),
        lambda stager: xferlib.Ring(stager, ((3,), np.float32)),
        lambda stager: xferlib.SharedRing(stager, ((3,), np.float32), 4),
    ],
    ids=["prefetch", "drain", "stream_map", "Ring", "SharedRing"],
)
def test_a_closed_stager_is_refused_on_the_spot(stager: xferlib.Stager, begin: Any) -> None:
    stager.close()
    with pytest.raises(xferlib.ClosedError, match=r"this stager is closed\. Open another one with xferlib\.stager"):
        begin(stager)


def test_the_slots_of_a_shared_ring_are_given_by_position_too(stager: xferlib.Stager) -> None:
    with xferlib.SharedRing(stager, ((3,), np.float32), 4) as ring:
        assert ring.slots == 4
