"""Handles that are used again when nobody refers to them any more."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from xferlib import handles as module
from xferlib.handles import Handles, Keep, unreferenced


class Holder:
    """Something that holds others, perhaps in a cycle."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.me = self


def numbers(count: int) -> list[int]:
    """Return numbers each of which is an object of its own, as handles of a driver are."""
    return [int(str(10**12 + number)) for number in range(count)]


def found(owned: list[int]) -> list[int]:
    # A copy of each: to find it again must not be to refer to it.
    return [number - 10**12 for number in unreferenced(owned)]


def test_a_handle_is_free_when_nobody_but_the_list_refers_to_it() -> None:
    owned = numbers(4)
    held: deque[Any] = deque([owned[1]])
    holder = Holder(owned[2])
    assert found(owned) == [0, 3]
    held.clear()
    assert found(owned) == [0, 1, 3]
    del holder
    # In a cycle, and not collected yet: a finalizer may still use it.
    assert found(owned) == [0, 1, 3]
    gc.collect()
    assert found(owned) == [0, 1, 2, 3]


def test_a_handle_that_was_taken_up_again_is_not_free() -> None:
    owned, free = numbers(3), deque[int]()
    free.extend(unreferenced(owned))
    free.extend(unreferenced(owned))
    assert list(free) == owned
    taken = free.pop()
    free.extend(unreferenced(owned))
    assert len(free) == 2
    assert taken is owned[2]


class Maker:
    """Makes handles, as a driver does."""

    def __init__(self) -> None:
        self.made = 0
        self.refuses = False

    def create(self, keep: Keep[int], count: int) -> None:
        if self.refuses:
            raise ArithmeticError("on purpose")
        keep(10**12 + self.made + number for number in range(count))
        self.made += count


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def handles(maker: Maker) -> Handles[int]:
    return Handles(maker.create)


def test_those_in_use_are_different_and_dropped_ones_are_used_again(maker: Maker, handles: Handles[int]) -> None:
    live = [handles.take() for _ in range(100)]
    assert len(set(live)) == 100
    assert len(handles) == maker.made <= 400
    made = maker.made
    del live[:]
    for _ in range(10_000):
        handles.take()
    assert maker.made == made == len(handles)


def test_one_that_is_given_back_comes_next(handles: Handles[int]) -> None:
    handle = handles.take()
    handles.free.append(handle)
    assert handles.take() is handle
    assert handles.take() is not handle


@pytest.mark.parametrize("used", [7, 1000])
def test_they_are_looked_for_seldom_though_most_are_in_use(
    handles: Handles[int], monkeypatch: pytest.MonkeyPatch, used: int
) -> None:
    looks = []

    def counted(owned: list[Any]) -> Any:
        looks.append(len(owned))
        return unreferenced(owned)

    monkeypatch.setattr(module, "unreferenced", counted)
    live = [handles.take() for _ in range(used)]
    for _ in range(1000):
        handles.take()
    assert sum(looks) <= 4 * (1000 + len(live))


def test_a_maker_that_refuses_is_heard_and_asked_again(maker: Maker, handles: Handles[int]) -> None:
    maker.refuses = True
    with pytest.raises(ArithmeticError):
        handles.take()
    maker.refuses = False
    assert handles.take()


class Raced(deque[int]):
    """What other threads have taken, and let go of, before whoever found it comes to look: some times."""

    times = 3

    def extend(self, found: Iterable[int]) -> None:
        super().extend(found)
        if self.times:
            self.times -= 1
            self.clear()


def test_what_other_threads_were_faster_to_take_is_not_taken_for_used_up(maker: Maker, handles: Handles[int]) -> None:
    # So not all of them are free.
    held = handles.take()
    made = maker.made
    handles.free = raced = Raced()
    assert handles.take() in set(handles._owned) - {held}
    assert raced.times == 0
    assert maker.made == made


class Found(deque[int]):
    """Of which other threads take what is found, and then, while it is counted, find it again."""

    def __init__(self, owned: list[int]) -> None:
        super().__init__()
        self._owned = owned
        self.counted = 0

    def extend(self, found: Iterable[int]) -> None:
        super().extend(found)
        if not self.counted:
            self.clear()

    def __len__(self) -> int:
        number = super().__len__()
        self.counted += 1
        if self.counted == 1:
            super().extend(unreferenced(self._owned))
        return number


def test_what_other_threads_have_found_meanwhile_is_not_taken_for_used_up(maker: Maker, handles: Handles[int]) -> None:
    handles.take()
    made = maker.made
    handles.free = found = Found(handles._owned)
    assert handles.take() in handles._owned
    assert found.counted > 1
    assert maker.made == made


class Used(deque[int]):
    """Of which another thread, before whoever found them counts, takes all that were found, and one that it makes for itself."""

    def __init__(self, handles: Handles[int]) -> None:
        super().__init__()
        self._handles = handles
        self.taken: list[int] = []

    def extend(self, found: Iterable[int]) -> None:
        super().extend(found)
        if not self.taken:
            self.taken.append(self.pop())
            for _ in range(len(self) + 1):
                self.taken.append(self._handles.take())


def test_what_another_thread_makes_meanwhile_is_not_taken_for_used(maker: Maker, handles: Handles[int]) -> None:
    handles.take()
    made = maker.made
    handles.free = used = Used(handles)
    assert handles.take() not in used.taken
    assert len(used.taken) == made + 1
    assert maker.made == 2 * made
