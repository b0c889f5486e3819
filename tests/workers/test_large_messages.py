"""Tasks and replies larger than a socket holds: neither side waits for the other to read, whatever dies or is closed meanwhile."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import psutil
import pytest

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.steps import until
from tests.workers import fills
from tests.workers.conftest import descriptors, first
from tests.workers.fills import Gate, Large
from xferlib.pipeline.workers.channel import Channel, receive, send
from xferlib.pipeline.workers.shared_ring import SharedRing

HUGE = 8 << 20
"""Bytes. No socket holds so many."""
replaced = pytest.mark.filterwarnings("ignore:worker .* was killed by SIGKILL while it:RuntimeWarning")


def value(batch: dict[str, Any]) -> int:
    """Return the number with which the one array of a batch is filled."""
    (array,) = batch.values()
    return first(array)


def worker(ring: SharedRing) -> Any:
    """Return the one worker of a ring as its parent sees it."""
    (worker,) = ring._pool._workers
    return worker


@pytest.mark.parametrize(("load", "reply"), [(HUGE, HUGE), (HUGE, 1), (1, HUGE), (300 << 10, 300 << 10), (0, 0)])
def test_a_task_and_its_reply_may_be_of_any_size(ring: SharedRing, load: int, reply: int) -> None:
    tasks = [Large(number, bytes(load), reply) for number in range(6)]
    got = on_thread(lambda: [(value(batch), len(*batch)) for batch in ring.run(fills.large, tasks, workers=1)])
    assert got.result(40) == [(number, reply) for number in range(6)]


@replaced
def test_a_worker_that_is_killed_inside_a_reply_has_said_nothing(ring: SharedRing) -> None:
    run = ring.run(fills.large, [Large(number, b"", HUGE) for number in range(3)], workers=1)
    assert value(next(run)) == 0
    # It has begun to answer the next, and comes to no end while nobody reads.
    assert select.select([worker(ring).channel.fileno()], [], [], 20)[0]
    os.kill(victim := worker(ring).pid, signal.SIGKILL)
    assert on_thread(lambda: [value(batch) for batch in run]).result(20) == [1, 2]
    assert victim not in ring.pids


@replaced
def test_a_worker_that_is_killed_inside_a_task_loses_neither(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.large, [Large(0, b"", 1, slow), Large(1, bytes(HUGE), 1), Large(2, b"", 1)], workers=1)
    coming = on_thread(lambda: value(next(run)))
    victim = slow.arrived()
    # It reads nothing while it fills.
    until(lambda: worker(ring).channel.pending)
    os.kill(victim, signal.SIGKILL)
    slow.arrived()
    slow.open()
    assert coming.result(20) == 0
    assert [value(batch) for batch in run] == [1, 2]


def test_the_rest_of_a_task_goes_out_while_batches_come(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.large, [Large(0, b"", 1), Large(1, bytes(HUGE), 1, slow), Large(2, b"", 1)], workers=1)
    assert value(next(run)) == 0
    coming = on_thread(lambda: value(next(run)))
    # All of its task has arrived, although nobody was asked for a batch when it was sent.
    slow.arrived()
    slow.open()
    assert coming.result(20) == 1
    assert value(next(run)) == 2


def test_the_rest_of_a_task_goes_out_while_batches_come_that_were_there_already(
    stager: xferlib.Stager, gate: Callable[[int], Gate]
) -> None:
    """Whoever takes them waits for no worker, and may be long in coming back."""
    slow, later = gate(0), gate(1)
    with SharedRing(stager, (64, np.int64), slots=3) as ring:
        seen: set[int] = set()

        def all_have_filled() -> bool:
            seen.update(first(batch) for batch in ring.run(fills.whose, range(9), workers=3))
            return len(seen) == 3

        until(all_have_filled)
        tasks = [Large(0, b"", 1, slow), Large(1, b"", 1), Large(2, b"", 1), Large(3, bytes(300 << 10), 1, later)]
        run = ring.run(fills.large, tasks, workers=3)
        coming = on_thread(lambda: value(next(run)))
        slow.arrived()
        until(lambda: len(run._outcomes) == 2)
        slow.open()
        assert coming.result(20) == 0
        for pid in ring.pids:
            os.kill(pid, signal.SIGSTOP)
        assert value(next(run)) == 1
        (busy,) = [worker for worker in ring._pool._workers if worker.channel.pending]
        for pid in ring.pids:
            os.kill(pid, signal.SIGCONT)
        assert select.select([], [busy.channel.fileno()], [], 20)[1]
        assert value(next(run)) == 2
        on_thread(later.arrived).result(20)
        later.open()
        assert value(next(run)) == 3


def test_closing_waits_for_no_message(stager: xferlib.Stager, gate: Callable[[int], Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.pipeline.workers.shared_ring.FINISHING", 0.1)
    slow = gate(0)
    with SharedRing(stager, (64, np.int64), slots=3) as ring:
        run = ring.run(fills.large, [Large(0, b"", 1, slow), Large(1, bytes(HUGE), 1)], workers=1)
        coming = on_thread(lambda: next(run))
        pid = slow.arrived()
        until(lambda: worker(ring).channel.pending)
        on_thread(ring.close).result(20)
        with pytest.raises(xferlib.ClosedError):
            coming.result(20)
    assert not psutil.pid_exists(pid)


def test_a_later_run_takes_over_from_one_that_was_left_inside_messages(ring: SharedRing, gate: Callable[[int], Gate]) -> None:
    slow = gate(0)
    run = ring.run(fills.large, [Large(0, b"", HUGE), Large(1, bytes(HUGE), HUGE, slow), Large(2, bytes(HUGE), HUGE)], workers=1)
    assert value(next(run)) == 0
    later = ring.run(fills.number, range(10), workers=1)
    coming = on_thread(lambda: [first(batch) for batch in later])
    slow.arrived()
    slow.open()
    assert coming.result(20) == list(range(10))


class Knot:
    """A cycle that holds a batch, and looks at it when it dies."""

    def __init__(self, batch: dict[str, Any], number: int, wrong: list[int]) -> None:
        self.batch = batch
        self.me = self
        self.number = number
        self.wrong = wrong

    def __del__(self) -> None:
        if value(self.batch) != self.number:
            self.wrong.append(self.number)


@replaced
def test_an_epoch_of_large_messages_and_killed_workers_and_batches_that_die_in_cycles(stager: xferlib.Stager) -> None:
    rng = random.Random(1)
    resource_tracker.ensure_running()
    files, count = descriptors(), 30
    wrong: list[int] = []
    killed: set[int] = set()
    with SharedRing(stager, (1024, np.int64), slots=4) as ring:
        sizes = [rng.choice((0, 1000, 300 << 10, 1 << 20)) for _ in range(2 * count)]
        tasks = (Large(number, bytes(sizes[number]), sizes[count + number]) for number in range(count))
        got = []
        for batch in ring.run(fills.large, tasks, workers=2, retries=100):
            got.append(value(batch))
            transfer = stager.put(batch) if rng.random() < 0.5 else None
            if rng.random() < 0.7:
                Knot(batch, got[-1], wrong)
            if transfer is not None:
                assert value(transfer.result()) == got[-1]
            if rng.random() < 0.2:
                gc.collect()
            if len(got) % 8 == 0 and (alive := [pid for pid in ring.pids if pid not in killed]):
                killed.add(victim := rng.choice(alive))
                os.kill(victim, signal.SIGKILL)
            del batch, transfer
        assert got == list(range(count))
        assert len(killed) == 3
    del ring
    gc.collect()
    assert wrong == []
    assert not any(psutil.pid_exists(pid) for pid in killed)
    assert descriptors() - files == Counter()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """Both sides of a connection."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()
    channel.close()


def test_a_channel_keeps_what_has_no_room_and_sends_it_in_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    said = [bytes(HUGE), "small", [1, 2], bytes(300_000)]
    for message in said:
        channel.send(message)
    assert channel.pending
    heard = on_thread(lambda: [receive(theirs) for _ in said])
    while channel.pending:
        select.select([], [channel.fileno()], [], 1)
        channel.flush()
    assert heard.result(20) == said


def test_a_channel_gives_whole_messages_only(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    assert channel.receive() == []
    data = bytearray()
    ours, there = socket.socketpair()
    with ours, there:
        send(there, "first")
        send(there, {"second": 2})
        data += ours.recv(1000)
    got = []
    for byte in data:
        theirs.send(bytes([byte]))
        got.append(channel.receive())
    assert [messages for messages in got if messages] == [["first"], [{"second": 2}]]
    assert got[-1] == [{"second": 2}]
    assert not channel.over


def test_what_was_said_before_hanging_up_is_heard_and_half_a_message_is_not(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    send(theirs, "whole")
    theirs.send(b"\0\0")
    theirs.close()
    assert channel.receive() == ["whole"]
    assert channel.over
    assert channel.receive() == []
    channel.send("to nobody")
    assert not channel.pending


def test_a_worker_s_side_says_when_nobody_is_there(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send("last")
    waiting = threading.Event()

    def listen() -> list[object]:
        said = [receive(theirs)]
        waiting.set()
        with pytest.raises(EOFError):
            receive(theirs)
        return said

    heard = on_thread(listen)
    assert waiting.wait(20)
    channel.close()
    assert heard.result(20) == ["last"]
    with pytest.raises(ConnectionError):
        send(theirs, bytes(HUGE))
