"""Transfers, memory and stagers that are interrupted anywhere: nothing stays held, nothing stays behind, and others work on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

import xferlib
from tests.core.fakes import on_thread, until
from tests.interrupts.harness import COUNT, PATIENCE, SEED, interrupted, until_free
from tests.interrupts.transfers import OPERATIONS, STAGED, STARTS, WAITS, Bench, interrupt
from xferlib.ledger import all_ledgers

HOST = OPERATIONS["host"]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", HOST)
@pytest.mark.filterwarnings("ignore")
def test_what_is_interrupted_leaves_nothing_held_and_nothing_behind(name: str, twice: bool) -> None:
    assert interrupt("host", HOST[name], times=COUNT, seed=SEED, strikes=1 + twice, meanwhile="idle") == COUNT


@pytest.mark.parametrize("name", [name for name in STARTS if name != "put of a tree"])
@pytest.mark.filterwarnings("ignore")
def test_a_start_that_is_interrupted_while_copies_are_held_leaves_nothing_behind(name: str) -> None:
    # An interrupted start waits until its copy is done, and for each pageable leaf again: the second one ends that.
    assert interrupt("host", STARTS[name], times=COUNT, seed=SEED, strikes=2, meanwhile="held") == COUNT


@pytest.mark.parametrize("name", ["put staged", "put borrowed", "get staged"])
@pytest.mark.filterwarnings("ignore")
def test_a_staged_transfer_that_is_interrupted_while_copies_are_held_leaves_nothing_behind(name: str) -> None:
    # Waiting to be staged, waiting until nothing reads the source, waiting for the copies: an interrupt ends each.
    assert interrupt("host", STAGED[name], times=COUNT, seed=SEED, strikes=3, meanwhile="held") == COUNT


@pytest.mark.parametrize("name", [*WAITS, "value borrowed", "result staged"])
@pytest.mark.filterwarnings("ignore")
def test_waiting_that_is_interrupted_leaves_nothing_behind(name: str) -> None:
    assert interrupt("host", HOST[name], times=COUNT, seed=SEED, strikes=1, meanwhile="slow") == COUNT


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_an_interrupted_close_can_be_repeated_by_anybody(twice: bool) -> None:
    benches = [Bench("host")]

    def close() -> None:
        benches[-1].stager.close()

    def again() -> None:
        bench = benches.pop()
        pinned, there = bench.pinned, bench.there
        on_thread(bench.stager.close).result(PATIENCE)
        bench.stager.close()
        assert (pinned == 3).all()
        assert (there == 3).all()
        benches.append(Bench("host"))
        benches[-1].slow()
        benches[-1].stager.put(benches[-1].pinned[: benches[-1].new_size()])

    assert interrupted(close, times=COUNT, seed=SEED, strikes=1 + twice, after=again).hits == COUNT
    close()


def opened_and_dropped() -> None:
    stager = xferlib.stager("host", pinned_limit=64 << 20)
    stager.get(stager.put(np.zeros(100_000, np.uint8)).value).synchronize()
    stager.empty_pinned(5 << 20, np.uint8)


def opened_and_closed() -> None:
    stager = xferlib.stager("host", pinned_limit=64 << 20)
    stager.get(stager.put(np.zeros(100_000, np.uint8)).value).synchronize()
    stager.close()


@pytest.mark.parametrize("operation", [opened_and_dropped, opened_and_closed])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.filterwarnings("ignore")
def test_no_stager_that_nobody_has_any_more_stays_open(operation: Callable[[], None], twice: bool) -> None:
    gc.collect()
    before = len(all_ledgers())
    assert interrupted(operation, times=10 * COUNT, seed=SEED, strikes=1 + twice).hits == 10 * COUNT
    until_free()
    gc.collect()
    assert until(lambda: len(all_ledgers()) == before, PATIENCE)
    assert until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-host")], PATIENCE)
