"""What comes out of a ring that workers fill, and when a slot is filled again."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests import children
from tests.core.fakes import held, on_thread, succeeds, tampered
from tests.pipeline.steps import until
from tests.workers import fills
from tests.workers.conftest import first
from tests.workers.fills import Gate
from xferlib.errors import AllocationError, ClosedError, WorkerError
from xferlib.pipeline.workers.process import Worker
from xferlib.pipeline.workers.run import WorkerTraceback
from xferlib.pipeline.workers.shared_ring import SharedRing

TREE = {"image": ((6, 4), np.int32), "label": (6, np.int64)}


def h2d(stager: xferlib.Stager) -> Any:
    """Return the host backend's engine of this direction."""
    return stager.backend.h2d  # type: ignore[attr-defined]  # the host backend's


def test_batches_come_in_the_order_of_the_tasks(pair: SharedRing) -> None:
    assert [first(batch) for batch in pair.run(fills.number, range(40), workers=2)] == list(range(40))


def test_no_more_workers_are_started_than_there_are_slots(pair: SharedRing) -> None:
    assert [first(batch) for batch in pair.run(fills.number, range(6), workers=100)] == list(range(6))
    assert len(pair.pids) <= pair.slots


def test_a_slow_task_delays_the_order_and_not_the_others(pair: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = pair.run(fills.behind, [(0, slow), 1, 2], workers=2, ordered=False)
    got = [first(next(run))]
    slow.arrived()
    slow.open()
    got += [first(batch) for batch in run]
    assert got[0] in (1, 2)
    assert sorted(got) == [0, 1, 2]
    ordered = pair.run(fills.behind, [(0, slow), 1, 2], workers=2)
    coming = on_thread(lambda: first(next(ordered)))
    slow.arrived()
    assert not coming.done()
    slow.open()
    assert coming.result(10) == 0
    assert [first(batch) for batch in ordered] == [1, 2]


def test_trees_and_ragged_batches_arrive_as_filled(stager: xferlib.Stager) -> None:
    with SharedRing(stager, TREE, slots=3) as ring:
        for count, batch in zip([6, 1, 0], ring.run(fills.rows, [6, 1, 0], workers=1), strict=True):
            assert (batch["image"].shape, batch["label"].shape) == ((count, 4), (count,))
            device = stager.put(batch).value
            assert (device["image"] == count).all()
            assert (device["label"] == count).all()
        (batch,) = ring.run(fills.views, [5], workers=1)
        assert (batch["label"].tolist(), batch["even"].tolist()) == ([5] * 4, [[5, 5]] * 3)


def test_batches_of_a_class_of_the_users_arrive_as_such(stager: xferlib.Stager) -> None:
    spec = fills.Batch(**TREE)
    with SharedRing(stager, spec, slots=3) as ring:
        batches = list(ring.run(fills.batch, range(3), workers=2))
    assert [type(batch) for batch in batches] == [fills.Batch] * 3
    assert [(first(batch.image), first(batch.label)) for batch in batches] == [(0, 0), (1, 1), (2, 2)]


def test_no_byte_is_copied_by_the_cpu_on_the_way_to_the_device(stager: xferlib.Stager, pair: SharedRing) -> None:
    before = stager.stats()
    with held(h2d(stager)):
        transfers = [stager.put(batch) for batch in pair.run(fills.number, range(3), workers=2)]
        assert not any(transfer.done() for transfer in transfers)
    assert [first(transfer.result()) for transfer in transfers] == [0, 1, 2]
    after = stager.stats()
    assert after.synchronous == before.synchronous
    assert after.h2d_nbytes - before.h2d_nbytes == 3 * 64 * 8


def test_a_slot_is_not_filled_while_a_copy_reads_it(stager: xferlib.Stager, pair: SharedRing) -> None:
    run = pair.run(fills.number, range(8), workers=2)
    with held(h2d(stager)) as gate:
        batch = next(run)
        place = batch.ctypes.data
        transfer = stager.put(batch)
        del batch
        for _ in range(5):
            assert next(run).ctypes.data != place
        others = [stager.put(next(run))]
        others.append(stager.put(next(run)))
        assert list(run) == []
        # All three slots are in flight now, and the next pass has none until a copy is done.
        coming = on_thread(lambda: first(next(pair.run(fills.number, [100], workers=2))))
        assert not coming.done()
        gate.set()
        assert coming.result(10) == 100
    assert first(transfer.result()) == 0
    assert [first(other.result()) for other in others] == [6, 7]


def test_a_ring_feeds_a_stager_that_is_not_its_own(pair: SharedRing) -> None:
    # As two stagers of one GPU do: what either has pinned is pinned.
    with xferlib.stager(tampered(is_pinned=lambda address, nbytes: True)) as other:
        before = other.stats().synchronous
        with xferlib.prefetch(pair.run(fills.number, range(12), workers=2), other) as batches:
            assert on_thread(lambda: [first(batch) for batch in batches]).result(10) == list(range(12))
        assert other.stats().synchronous == before


@pytest.mark.parametrize("rewrites", [None, True, False])
def test_a_ring_feeds_a_prefetch(stager: xferlib.Stager, pair: SharedRing, rewrites: bool | None) -> None:
    before = stager.stats().synchronous
    run = pair.run(fills.number, range(20), workers=2)
    with xferlib.prefetch(run, stager, rewrites=rewrites) as batches:
        assert [first(batch) for batch in batches] == list(range(20))
    assert stager.stats().synchronous == before


def test_a_run_is_as_long_as_its_tasks_say_and_so_is_the_prefetch_of_it(stager: xferlib.Stager, pair: SharedRing) -> None:
    with xferlib.prefetch(pair.run(fills.number, range(5), workers=2), stager) as loop:
        assert len(loop) == 5
        assert len(list(loop)) == 5
    with pair.run(fills.number, iter(range(5)), workers=2) as run:
        with pytest.raises(TypeError, match="this loop has no length"):
            len(run)
        assert run
        assert [first(batch) for batch in run] == list(range(5))


def test_an_error_in_fill_comes_through_a_prefetch_at_its_place(stager: xferlib.Stager, pair: SharedRing) -> None:
    batches = xferlib.prefetch(pair.run(fills.fail, ["none", "own", "none"], workers=2), stager, rewrites=False)
    assert first(next(batches)) == 1
    with pytest.raises(fills.OwnError):
        next(batches)
    assert [first(batch) for batch in batches] == [1]


def test_a_slot_is_not_filled_while_the_consumer_has_a_view_of_it(pair: SharedRing) -> None:
    run = pair.run(fills.number, range(20), workers=2)
    kept = next(run)[3:5]
    for _ in range(18):
        next(run)
    assert kept.tolist() == [0, 0]
    assert first(next(run)) == 19


def test_tasks_are_taken_only_as_slots_become_free(pair: SharedRing) -> None:
    taken = []

    def tasks() -> Iterator[int]:
        for index in range(100):
            taken.append(index)
            yield index

    run = pair.run(fills.number, tasks(), workers=2)
    batches = [next(run) for _ in range(3)]
    assert len(taken) == 4
    del batches[1]
    assert first(next(run)) == 3
    assert len(taken) == 5


def test_a_consumer_that_holds_every_slot_is_told_so(pair: SharedRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.pipeline.workers.run.STUCK_SECONDS", 0.01)
    run = pair.run(fills.number, range(4), workers=2)
    batches = [next(run) for _ in range(3)]
    with pytest.raises(RuntimeWarning, match="have held every slot"):
        next(run)
    batches.clear()
    assert first(next(run)) == 3


def test_a_consumer_that_holds_every_slot_again_is_told_again(pair: SharedRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.pipeline.workers.run.STUCK_SECONDS", 0.01)
    with pair.run(fills.number, range(5), workers=2) as run:
        batches = [next(run) for _ in range(3)]
        with pytest.raises(RuntimeWarning, match="have held every slot"):
            next(run)
        batches[0] = None
        batches[0] = next(run)
        with pytest.raises(RuntimeWarning, match="have held every slot"):
            on_thread(lambda: next(run)).result(10)


def test_a_batch_comes_when_it_is_filled_though_there_is_no_slot_for_the_next(
    stager: xferlib.Stager, gate: Callable[[int], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    for nap in ("FIRST_NAP_SECONDS", "LONGEST_NAP_SECONDS"):
        monkeypatch.setattr(f"xferlib.pipeline.workers.run.{nap}", 20.0)
    slow = gate(0)
    with SharedRing(stager, (64, np.int64), slots=2) as ring:
        run = ring.run(fills.behind, [0, (1, slow), 2], workers=1)
        kept = next(run)
        coming = on_thread(lambda: first(next(run)))
        slow.arrived()
        until(lambda: run._starved)
        slow.open()
        assert coming.result(10) == 1
        assert first(kept) == 0


def test_slots_that_workers_are_filling_are_held_by_no_consumer(
    pair: SharedRing, gate: Callable[[int], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: nobody is told to let go of batches."""
    monkeypatch.setattr("xferlib.pipeline.workers.run.STUCK_SECONDS", -1.0)
    slow = gate(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run = pair.run(fills.behind, [(0, slow), 1, 2, 3], workers=2)
        coming = on_thread(lambda: first(next(run)))
        slow.arrived()
        # One of the two may be starting: then the other has two tasks, and nobody wants a slot.
        until(lambda: run._starved or coming.done())
        slow.open()
        assert coming.result(10) == 0
        assert [first(batch) for batch in run] == [1, 2, 3]


def test_a_slot_in_a_dead_cycle_comes_back(pair: SharedRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.pipeline.workers.run.STUCK_SECONDS", 0.01)
    gc.disable()
    try:
        run = pair.run(fills.number, range(4), workers=2)
        for _ in range(3):
            knot = [next(run)]
            knot.append(knot)
        del knot
        assert first(next(run)) == 3
    finally:
        gc.enable()


def test_an_error_in_fill_is_raised_in_place_of_its_batch(pair: SharedRing) -> None:
    run = pair.run(fills.fail, ["none", "own", "none"], workers=2)
    assert first(next(run)) == 1
    with pytest.raises(fills.OwnError) as caught:
        next(run)
    assert caught.value.args == ("something", 7)
    assert caught.value.__notes__ == ["raised by fill in a worker, for task 1 ('own')"]
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert 'raise OwnError("something", 7)' in str(caught.value.__cause__)
    assert first(next(run)) == 1
    assert list(run) == []


def test_the_traceback_of_a_worker_begins_in_fill(pair: SharedRing) -> None:
    with pytest.raises(fills.OwnError) as caught:
        next(pair.run(fills.fail, ["own"], workers=1))
    cause = str(caught.value.__cause__)
    assert [line.split('"')[1] for line in cause.splitlines() if line.startswith("  File ")] == [fills.__file__]


def test_tasks_that_fail_take_no_slot_with_them(pair: SharedRing) -> None:
    run = pair.run(fills.fail, [*["own"] * 7, "none"], workers=2)

    def step() -> int | str:
        try:
            return first(next(run))
        except fills.OwnError:
            return "failed"

    assert on_thread(lambda: [step() for _ in range(8)]).result(10) == [*["failed"] * 7, 1]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("stubborn", "StubbornError: 1 and 2"),
        ("disguised", "DisguisedError: in here"),
        ("far", "FarError: over there"),
        ("stop", "StopIteration"),
        ("exit", "enough"),
    ],
)
def test_what_cannot_be_raised_here_is_raised_in_words(pair: SharedRing, task: str, words: str) -> None:
    run = pair.run(fills.fail, [task, "none"], workers=2)
    with pytest.raises(WorkerError, match=words):
        next(run)
    assert first(next(run)) == 1


def test_an_error_to_which_nothing_can_be_added_is_raised_as_it_is(pair: SharedRing) -> None:
    run = pair.run(fills.fail, ["frozen", "none"], workers=1)
    with pytest.raises(fills.FrozenError, match="solid") as caught:
        next(run)
    assert 'raise FrozenError("solid")' in str(caught.value.__cause__)
    assert first(next(run)) == 1


def test_a_task_whose_error_takes_no_notes_is_the_only_one_that_is_lost(pair: SharedRing) -> None:
    class Unsendable:
        def __reduce__(self) -> str:
            raise fills.FrozenError("stays here")

    run = pair.run(fills.fail, [Unsendable(), "none"], workers=1)
    with pytest.raises(fills.FrozenError, match="stays here"):
        next(run)
    assert first(next(run)) == 1


def test_a_return_value_that_is_not_in_the_slot_is_an_error(pair: SharedRing) -> None:
    with pytest.raises(ValueError, match="not in its slot"):
        next(pair.run(fills.elsewhere, [1], workers=2))


def test_an_error_of_the_tasks_comes_after_the_batches_before_it(pair: SharedRing) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("no third")

    run = pair.run(fills.number, tasks(), workers=2)
    assert [first(next(run)), first(next(run))] == [1, 2]
    with pytest.raises(LookupError, match="no third") as caught:
        next(run)
    assert any(entry.name == "tasks" for entry in caught.traceback)
    assert list(run) == []


def test_an_error_that_is_kept_keeps_no_batch(pair: SharedRing) -> None:
    def tasks() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no fourth")

    gc.disable()
    try:
        errors: list[BaseException] = []
        run = pair.run(fills.number, tasks(), workers=2)
        for _ in range(3):
            next(run)
        try:
            next(run)
        except LookupError as error:
            errors.append(error)
        later = pair.run(fills.number, range(3), workers=2)
        assert on_thread(lambda: len([next(later) for _ in range(3)])).result(8) == 3
    finally:
        gc.enable()
    assert len(errors) == 1


def test_an_error_that_is_dropped_leaves_no_batch_of_whoever_asked(pair: SharedRing) -> None:
    batches: list[Any] = []

    def take_two(run: Any) -> None:
        batch = next(run)
        batches.append(weakref.ref(batch))
        next(run)

    gc.disable()
    try:
        with suppress(fills.OwnError):
            take_two(pair.run(fills.fail, ["none", "own"], workers=2))
        assert batches[0]() is None
    finally:
        gc.enable()


def test_a_task_that_cannot_be_sent_is_an_error_at_its_place(pair: SharedRing) -> None:
    run = pair.run(fills.number, [1, threading.Lock(), 3], workers=2)
    assert first(next(run)) == 1
    with pytest.raises(TypeError, match="pickle") as caught:
        next(run)
    assert caught.value.__notes__ == ["task 1 could not be sent to a worker"]
    assert first(next(run)) == 3


def test_a_fill_that_cannot_be_sent_is_refused_at_once(pair: SharedRing) -> None:
    with pytest.raises(TypeError, match="at the top of a module"):
        pair.run(lambda task, slot: None, [1])


NOTEBOOK = """
import functools
import numpy as np, xferlib
def fill(task, slot): slot[:] = task
class Filler:
    def __call__(self, task, slot): pass
with xferlib.stager("host") as stager, xferlib.SharedRing(stager, ((4,), "f4"), slots=2) as ring:
    for one in (fill, functools.partial(fill), Filler()):
        try:
            ring.run(one, [1])
        except TypeError as error:
            print(str(error).partition("is defined ")[2])
    assert ring.pids == ()
"""


def test_a_fill_of_an_interactive_session_is_refused_before_a_worker_starts() -> None:
    said = succeeds(NOTEBOOK).splitlines()
    assert len(said) == 3
    for line in said:
        assert line.startswith("in an interactive session, where a worker process cannot import it. Write it to a module, ")


def test_a_fill_of_a_program_in_a_file_is_not(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import xferlib\n"
        "def fill(task, slot): slot[:] = task\n"
        "if __name__ == '__main__':\n"
        "    with xferlib.stager('host') as stager, xferlib.SharedRing(stager, ((4,), 'f4'), slots=2) as ring:\n"
        "        print([float(batch.sum()) for batch in ring.run(fill, [1, 2], workers=1)])\n"
    )
    done = children.run([sys.executable, str(file)], seconds=60)
    assert done.stdout == "[4.0, 8.0]\n", done.stderr


def test_a_fill_that_only_the_program_itself_defines_is_told_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import xferlib\n"
        "if __name__ == '__main__':\n"
        "    def fill(task, slot): slot[:] = task\n"
        "    with xferlib.stager('host') as stager, xferlib.SharedRing(stager, ((4,), 'f4'), slots=2) as ring:\n"
        "        next(ring.run(fill, [1, 2], workers=1))\n"
    )
    done = children.run([sys.executable, str(file)], seconds=60)
    assert "a worker process could not import fill. Define it at the top of a module" in done.stderr


def test_a_fill_that_cannot_be_loaded_fails_each_task_in_words(pair: SharedRing) -> None:
    run = pair.run(fills.Unloadable(), [1, 2], workers=2)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
            next(run)
    assert first(next(pair.run(fills.number, [5], workers=2))) == 5


def test_workers_and_what_fill_carries_stay_through_a_run_and_the_workers_longer(pair: SharedRing) -> None:
    assert [first(batch) for batch in pair.run(fills.Counter(10), range(6), workers=1)] == [10, 11, 12, 13, 14, 15]
    before = pair.pids
    assert [first(batch) for batch in pair.run(fills.Counter(20), range(2), workers=1)] == [20, 21]
    assert pair.pids == before


def test_workers_load_no_framework_and_no_backend(pair: SharedRing) -> None:
    (batch,) = pair.run(fills.modules, [None], workers=1)
    assert batch.shape == (0,)


def test_a_later_run_ends_the_one_before_and_a_closed_one_is_over(pair: SharedRing) -> None:
    run = pair.run(fills.number, range(9), workers=2)
    next(run)
    later = pair.run(fills.number, [3], workers=2)
    with pytest.raises(RuntimeError, match="a later run"):
        next(run)
    assert first(next(later)) == 3
    later.close()
    with pytest.raises(xferlib.ClosedError, match=r"this run has ended.*for each epoch"):
        list(later)
    with pair.run(fills.number, range(9), workers=2) as another:
        next(another)
    assert [first(batch) for batch in pair.run(fills.number, range(9), workers=2)] == list(range(9))


def test_a_run_that_has_ended_hears_no_other_reason(pair: SharedRing, stager: xferlib.Stager) -> None:
    run = pair.run(fills.number, [1], workers=2)
    assert [first(batch) for batch in run] == [1]
    # Not empty, as if the epoch had no tasks.
    with pytest.raises(xferlib.ClosedError, match=r"this run has ended.*for each epoch"):
        list(xferlib.prefetch(run, stager))
    left = pair.run(fills.number, [2], workers=2)
    assert next(run, None) is None
    later = pair.run(fills.number, [3], workers=2)
    left.close()
    with pytest.raises(RuntimeError, match="a later run"):
        next(left)
    assert [first(batch) for batch in later] == [3]


def test_a_run_of_fewer_workers_than_there_are_uses_no_more(pair: SharedRing) -> None:
    seen: set[int] = set()

    def both_have_filled() -> bool:
        """Until then one may be starting, and would be left out anyway."""
        seen.update(first(batch) for batch in pair.run(fills.whose, range(6), workers=2))
        return len(seen) == 2

    until(both_have_filled)
    assert len({first(batch) for batch in pair.run(fills.whose, range(6), workers=1)}) == 1


def test_a_batch_of_a_run_that_was_left_never_comes_out_of_the_next(pair: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = pair.run(fills.behind, [7, (8, slow), 9], workers=2)
    assert first(next(run)) == 7
    slow.arrived()
    run.close()
    after = pair.run(fills.number, range(20), workers=2)
    got = [first(next(after)) for _ in range(10)]
    slow.open()
    got += [first(batch) for batch in after]
    assert got == list(range(20))


def test_arguments_that_make_no_sense_are_refused(stager: xferlib.Stager, pair: SharedRing) -> None:
    with pytest.raises(ValueError, match="slots=1: expected 2 or more"):
        SharedRing(stager, (4, "f4"), slots=1)
    for wrong, words in (
        ({"workers": 0}, "workers=0: expected 1 or more"),
        ({"retries": -1}, "retries=-1: expected 0 or more"),
        ({"on_death": "ignore"}, "on_death='ignore': expected 'replace' or 'raise'"),
    ):
        with pytest.raises(ValueError, match=words):
            pair.run(fills.number, [], **wrong)
    for odd, words in (({"workers": 1.5}, "workers=1.5"), ({"workers": True}, "workers=True"), ({"retries": "2"}, "retries='2'")):
        with pytest.raises(TypeError, match=f"{words}: expected a whole number"):
            pair.run(fills.number, [], **odd)
    with pytest.raises(TypeError, match="fill=3: expected a function"):
        pair.run(3, [])  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="slots='3': expected a whole number"):
        SharedRing(stager, (4, "f4"), slots="3")  # type: ignore[arg-type]  # on purpose


def test_tasks_that_cannot_be_iterated_are_refused_and_the_run_before_goes_on(pair: SharedRing) -> None:
    run = pair.run(fills.number, range(2), workers=2)
    # Whatever a finalizer raises fails the test as well.
    with pytest.raises(TypeError, match="tasks=5: expected something to iterate"):
        pair.run(fills.number, 5)  # type: ignore[arg-type]  # The point of the test.
    assert [first(batch) for batch in run] == [0, 1]


def test_a_ring_beyond_the_limit_is_refused_before_memory_is_taken(stager: xferlib.Stager) -> None:
    with pytest.raises(AllocationError, match=r"8 slots of 16\.0 MiB need 128\.0 MiB .*pinned_limit=67108864"):
        SharedRing(stager, (16 << 20, np.uint8))


def test_a_ring_may_take_all_that_the_limit_allows() -> None:
    with xferlib.stager("host", pinned_limit=1 << 20) as stager, SharedRing(stager, (1 << 19, np.uint8), slots=2) as ring:
        assert ring.nbytes == stager.stats().pinned_limit_nbytes


def test_a_stager_that_cannot_pin_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = xferlib.registry.open_backend("host")
    flags = xferlib.Capabilities(streams=True, put_into=True)
    monkeypatch.setattr(type(backend), "capabilities", flags)
    with xferlib.stager(backend) as stager, SharedRing(stager, (64, np.int64), slots=2) as ring:
        assert [first(stager.put(batch).result()) for batch in ring.run(fills.number, range(4), workers=1)] == [0, 1, 2, 3]
        assert stager.stats().synchronous == 4


def test_closing_leaves_batches_valid_and_ends_a_run(stager: xferlib.Stager) -> None:
    before = stager.stats().h2d_nbytes
    with SharedRing(stager, (64, np.int64), slots=3) as ring:
        run = ring.run(fills.number, range(9), workers=1)
        batch = next(run)
        transfer = stager.put(next(run))
    ring.close()
    assert repr(ring) == "<SharedRing of 3 slots: int64[64], 512 bytes, closed>"
    with pytest.raises(ClosedError, match="this ring is closed"):
        next(run)
    with pytest.raises(ClosedError):
        ring.run(fills.number, [])
    assert first(batch) == 0
    assert first(transfer.result()) == 1
    batch[...] = 5
    assert first(stager.put(batch).result()) == 5
    assert stager.stats().h2d_nbytes > before


def test_closing_wakes_an_iteration_on_another_thread(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.behind, [(0, slow)], workers=1)
    coming = on_thread(lambda: next(run))
    slow.arrived()
    ring.close()
    with pytest.raises(ClosedError):
        coming.result(10)


class Owner:
    """Closes its ring at its end. `collected`: by the collector, else as its last reference goes."""

    def __init__(self, ring: SharedRing, *, collected: bool) -> None:
        self.ring = ring
        self.me = self if collected else None

    def __del__(self) -> None:
        self.ring.close()


@pytest.mark.parametrize("who", ["tasks", "owner", "collected owner"])
def test_a_ring_that_is_closed_inside_a_step_of_its_run_is_closed_behind_it(stager: xferlib.Stager, who: str) -> None:
    ring = SharedRing(stager, (64, np.int64), slots=3)
    pids: list[int] = []

    def tasks() -> Iterator[int]:
        yield 0
        pids.extend(ring.pids)
        if who == "tasks":
            ring.close()
        else:
            Owner(ring, collected=who == "collected owner")
            gc.collect()
        yield 1

    # On a thread, so that one that waits for itself fails the test.
    taken = on_thread(lambda: list(ring.run(fills.number, tasks(), workers=1)))
    with pytest.raises(ClosedError, match="this ring is closed"):
        taken.result(20)
    until(lambda: ring._holdings.memory is None)
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_finalizer_on_the_thread_that_starts_workers_may_close_the_ring(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = SharedRing(stager, (64, np.int64), slots=3)
    start = Worker._start

    def collecting(worker: Worker) -> None:
        start(worker)
        Owner(ring, collected=True)
        gc.collect()

    monkeypatch.setattr(Worker, "_start", collecting)
    # As on the main thread: whoever takes a step waits for another thread, which starts the worker.
    monkeypatch.setattr(
        "xferlib.pipeline.workers.pool.uninterrupted", lambda call, *given: on_thread(lambda: call(*given)).result(20)
    )
    with pytest.raises(ClosedError, match="this ring is closed"):
        on_thread(lambda: next(ring.run(fills.number, [0], workers=1))).result(20)
    until(lambda: ring._holdings.memory is None and not ring.pids)


def test_tasks_that_ask_their_run_for_a_batch_are_refused(pair: SharedRing) -> None:
    def tasks() -> Iterator[int]:
        yield 0
        yield first(next(run))

    run = pair.run(fills.number, tasks(), workers=1)
    assert first(on_thread(lambda: next(run)).result(20)) == 0
    with pytest.raises(RuntimeError, match="ask it for a batch"):
        on_thread(lambda: next(run)).result(20)


def test_a_run_of_a_ring_that_is_closed_meanwhile_says_so(stager: xferlib.Stager) -> None:
    ring = SharedRing(stager, (64, np.int64), slots=3)

    class Tasks:
        def __iter__(self) -> Iterator[int]:
            ring.close()
            return iter([1])

    run = ring.run(fills.number, Tasks(), workers=1)
    with pytest.raises(ClosedError, match="this ring is closed"):
        next(run)


def test_a_ring_that_was_never_closed_says_so_and_is_closed(stager: xferlib.Stager) -> None:
    line = sys._getframe().f_lineno + 1
    ring = SharedRing(stager, (64, np.int64), slots=2)
    next(ring.run(fills.number, [1], workers=1))
    pool = weakref.ref(ring._pool)
    pids = ring.pids
    rings = [ring]
    del ring

    def gone() -> bool:
        rings.clear()
        return pool() is None

    with pytest.warns(ResourceWarning, match=r"<SharedRing of 2 slots: int64\[64\], 512 bytes> was never closed") as told:
        until(gone)
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_fill_gives_beside_its_arrays_comes_with_the_batch_and_is_put(stager: xferlib.Stager) -> None:
    with SharedRing(stager, TREE, slots=2) as ring:
        tasks: list[Any] = [({"name": f"{number}.png", "id": number}, None) for number in range(5)]
        run = ring.run(fills.names, tasks, workers=1)
        assert repr(run) == "<Run, 0 of 5 taken, 1 worker>"
        with xferlib.prefetch(run, stager) as loop:
            assert [(batch["name"], batch["id"], batch["image"].min()) for batch in loop] == [(f"{n}.png", n, 1) for n in range(5)]
        assert repr(run) == "<Run, 5 of 5 taken, ended>"
        views = ring.run(fills.numbered, range(5), workers=1)
        assert [(batch["at"], batch["image"][:, 0].tolist()) for batch in views] == [((f"{n}.png", n), [n, n]) for n in range(5)]
        broken = ring.run(fills.unmakeable, range(3), workers=1)
        assert first(next(broken)["image"]) == 0
        with pytest.raises(fills.Fragile, match="not here") as caught:
            next(broken)
        assert caught.value.__notes__ == ["what fill gave beside its arrays could not be made here, for task 1 (1)"]
        # That batch alone is lost, and its slot is free again.
        assert [first(batch["image"]) for batch in broken] == [2]
        stopped = ring.run(fills.stopping, range(3), workers=1)
        assert first(next(stopped)["image"]) == 0
        # It would look like the end of the run.
        with pytest.raises(RuntimeError, match="StopIteration was raised"):
            next(stopped)
        assert [first(batch["image"]) for batch in stopped] == [2]
