"""What a transfer and a loop say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, succeeds, until
from xferlib.sketch import sketched


def engine(stager: xferlib.Stager) -> Any:
    backend: Any = stager.backend
    return backend.h2d


def test_a_transfer_says_where_it_goes_what_it_moves_and_whether_it_is_done(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned((2, 3), np.float32)
    tree = "{'x': float32[2, 3], 'name': str, 'y': uint8[4]}"
    with held(engine(stager)):
        transfer = stager.put({"x": source, "name": "rides along", "y": np.zeros(4, np.uint8)})
        assert repr(transfer) == f"<Transfer H2D: {tree}, 28 bytes, in flight>"
    until(transfer.done)
    assert repr(transfer) == f"<Transfer H2D: {tree}, 28 bytes, done>"
    back = stager.get(transfer.result()["x"])
    back.synchronize()
    assert repr(back) == "<Transfer D2H: float32[2, 3], 24 bytes, done>"
    completion = back.completion
    assert completion.done()
    assert repr(completion) == "<Transfer D2H, done>"


def test_the_completion_is_found_by_its_first_name_with_a_warning(stager: xferlib.Stager) -> None:
    transfer = stager.put(np.zeros(4, np.uint8))
    with pytest.warns(DeprecationWarning, match=r"^Transfer\.end is called completion now$") as told:
        end = transfer.end
    assert told[0].filename == __file__
    end.synchronize()
    assert end.value is None


def test_of_many_arrays_some_are_named(stager: xferlib.Stager) -> None:
    transfer = stager.put([np.zeros(number, np.uint8) for number in range(6)])
    transfer.synchronize()
    assert repr(transfer) == "<Transfer H2D: [uint8[0], uint8[1], uint8[2], uint8[3], 2 more], 15 bytes, done>"


def test_what_is_borrowed_is_named_when_it_was_made(stager: xferlib.Stager) -> None:
    with held(engine(stager)):
        transfer = stager.put(np.zeros(3 << 20, np.uint8), borrow=True)
        assert repr(transfer) == "<Transfer H2D, in flight>"
    transfer.result()
    assert repr(transfer) == "<Transfer H2D: uint8[3145728], 3.0 MiB, done>"


def test_a_transfer_that_failed_says_so(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = stager.put(np.zeros(4))

    def fails() -> bool:
        raise stager.backend.failures[0]("lost")

    monkeypatch.setattr(transfer, "_event", type("Lost", (), {"done": staticmethod(fails)})())
    # It asks nobody.
    assert repr(transfer) == "<Transfer H2D: float64[4], 32 bytes, in flight>"
    with pytest.raises(xferlib.TransferError):
        transfer.done()
    assert repr(transfer) == "<Transfer H2D: float64[4], 32 bytes, failed>"


def test_a_transfer_of_the_parents_says_so() -> None:
    shown = succeeds(
        """
        import os
        import numpy as np, xferlib
        with xferlib.stager("host") as stager:
            transfer = stager.put(np.zeros(4))
            child = os.fork()
            if not child:
                print(repr(transfer), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """
    )
    assert shown == "<Transfer H2D: float64[4], 32 bytes, of another process>\n"


def test_a_loop_says_how_far_it_is(stager: xferlib.Stager) -> None:
    loop = xferlib.prefetch((np.zeros(3) for _ in range(5)), stager, 2)
    next(loop)
    assert until(lambda: repr(loop) == "<Prefetch, 1 taken, 2 ahead of 2>")
    list(loop)
    assert repr(loop) == "<Prefetch, 5 taken, spent>"
    other = xferlib.prefetch([np.zeros(3)], stager)
    other.close()
    assert repr(other) == "<Prefetch, 0 taken, closed>"


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: Any
    label: Any


class Odd:
    """An array by its attributes, which raise."""

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("not now")

    def __repr__(self) -> str:
        raise RuntimeError("not at all")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (np.zeros((128, 3), np.float32), "float32[128, 3], 1.5 KiB"),
        (np.float32(1), "float32[], 4 bytes"),
        (Point(np.zeros(2), None), "Point(x=float64[2], y=None), 16 bytes"),
        (Sample(np.zeros(2, np.uint8), ["cat"]), "Sample(image=uint8[2], label=[str]), 2 bytes"),
        ({("a", 1): (np.zeros(1, np.uint8),)}, "{tuple: (uint8[1])}, 1 byte"),
        ([[[[np.zeros(1, np.uint8)]]]], "[[[...]]], 1 byte"),
        ([Odd()], "list"),
        (object(), "object, 0 bytes"),
    ],
)
def test_a_tree_is_sketched_whatever_is_in_it(tree: Any, text: str) -> None:
    assert sketched(tree) == text


def test_a_sketch_is_short_however_large_the_tree() -> None:
    wide = {f"{'k' * 100}{number}": [{"a": [np.zeros((1,) * 32)] * 9}] * 9 for number in range(600)}
    deep: Any = np.zeros(1)
    for _ in range(5000):
        deep = [deep]
    for tree in (wide, deep, [wide] * 600, {"x": np.zeros((1,) * 32)}):
        assert len(sketched(tree)) < 240


def test_the_ends_of_a_pipeline_say_what_they_hold(stager: xferlib.Stager) -> None:
    words = "{'x': float32[128, 3]}, 1.5 KiB"
    with xferlib.Ring(stager, {"x": ((128, 3), np.float32)}) as ring:
        slot = ring.acquire()
        assert repr(ring) == f"<Ring of 3 slots: {words}, 2 idle>"
        assert repr(slot) == f"<Slot: {words}, acquired>"
        slot.put().synchronize()
        assert repr(slot) == f"<Slot: {words}, put>"
    assert repr(ring) == f"<Ring of 3 slots: {words}, closed>"
    with xferlib.Drain(stager) as drain:
        assert repr(drain) == "<Drain, 0 taken, 0 not taken, depth 2>"
        drain.submit(np.zeros(3))
        drain.end()
        assert repr(drain).startswith("<Drain, 0 taken, 1 not taken, the oldest <Transfer D2H: float64[3], 24 bytes, ")
        list(drain.results())
        assert repr(drain) == "<Drain, 1 taken, 0 not taken, ended>"


class Unknown:
    """As the arrays of a framework that asks nothing of what it does not know."""


def scaled_in_place(transfer: Any) -> None:
    transfer /= 255


FORGETTING: dict[str, Callable[[Any], object]] = {
    "key": lambda transfer: transfer["x"],
    "index": lambda transfer: transfer[0],
    "slice": lambda transfer: transfer[1:],
    "assignment": lambda transfer: transfer.__setitem__(0, 1),
    "loop": list,
    "array": np.asarray,
    "function": np.sin,
    "reduction": np.sum,
    "sum": lambda transfer: transfer + 1,
    "sum from the right": lambda transfer: 1 + transfer,
    "with an array on the left": lambda transfer: np.zeros(4) - transfer,
    "with what knows no transfer on the left": lambda transfer: Unknown() * transfer,
    "in place": scaled_in_place,
    "product": lambda transfer: transfer @ transfer,
    "power": lambda transfer: transfer**2,
    "sign": lambda transfer: -transfer,
    "comparison": lambda transfer: transfer < 1,
    "another comparison": lambda transfer: transfer >= 1,
    "comparison with an array": lambda transfer: np.zeros(4) == transfer,
    "number": float,
    "whole number": int,
    "length": len,
}


@pytest.mark.parametrize("forget", FORGETTING.values(), ids=FORGETTING)
def test_who_forgets_value_is_told(stager: xferlib.Stager, forget: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"a transfer is no array\. Take its arrays with \.value"):
        forget(stager.put(np.zeros(4)))


@pytest.mark.parametrize("name", ["shape", "dtype", "mean", "items"])
def test_who_asks_a_transfer_what_arrays_and_trees_have_is_told(stager: xferlib.Stager, name: str) -> None:
    transfer = stager.put(np.zeros(4))
    with pytest.raises(AttributeError, match=r"a transfer is no array\. Take its arrays with \.value"):
        getattr(transfer, name)
    assert not hasattr(transfer, name)
    assert name not in dir(transfer)
    assert "value_on" in dir(transfer)


def test_a_transfer_is_true_and_is_found_among_others(stager: xferlib.Stager) -> None:
    transfers = [stager.put(np.zeros(4)) for _ in range(3)]
    assert all(transfers)
    assert [transfers.index(transfer) for transfer in transfers] == [0, 1, 2]
    assert len(set(transfers)) == 3
