"""Gates without a device: who opens them, and that the watchdog's process neither fails to start nor stays behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest

from xferlib.gates import Gate, gate_table

LIMIT = 10.0
"""Seconds. How long a test looks before it fails; none needs a tenth of a second longer than what it waits for."""


def word(gate: Gate) -> int:
    return ctypes.c_uint32.from_address(gate.address).value


def test_a_gate_is_shut_until_the_test_opens_it() -> None:
    gate = Gate()
    try:
        assert (word(gate), gate.shut, gate.opened_by) == (0, True, None)
        gate.open()
        gate.open()
        assert (word(gate), gate.shut, gate.opened_by) == (1, False, "test")
    finally:
        gate.give_back()


def test_the_watchdog_opens_an_overdue_gate_while_a_call_blocks_with_the_gil_held() -> None:
    gate = Gate(seconds=0.2)
    try:
        # PyDLL keeps the GIL: no other thread of this process runs before poll(2) returns.
        ctypes.PyDLL(None).poll(None, 0, 1000)
        assert word(gate) == 1
        assert gate.opened_by == "watchdog"
        gate.open()
        assert gate.opened_by == "watchdog", "the first to open it is the one who is named"
    finally:
        gate.give_back()


def test_the_watchdog_leaves_gates_alone_that_are_not_overdue() -> None:
    overdue, other = Gate(seconds=0.1), Gate()
    try:
        deadline = time.monotonic() + LIMIT
        while overdue.shut:
            assert time.monotonic() < deadline, "the watchdog never came"
        assert other.shut
    finally:
        overdue.give_back()
        other.give_back()


def test_a_gate_that_is_given_back_is_open() -> None:
    gate = Gate()
    gate.give_back()
    assert word(gate) == 1, "who waits for its word would wait until the watchdog comes"


def test_gates_are_refused_when_every_word_is_in_use() -> None:
    gates = [Gate() for _ in range(len(gate_table().free))]
    try:
        assert len({gate.address for gate in gates}) == len(gates)
        with pytest.raises(RuntimeError, match="gates are in use"):
            Gate()
    finally:
        for gate in gates:
            gate.give_back()


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_the_watchdog_ends_with_its_process(ending: str) -> None:
    script = f"""
import os
from xferlib.gates import Gate, gate_table

Gate()
print(gate_table()._watchdog.pid, flush=True)
{ending}
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.stdout, child.stderr
    watchdog = int(child.stdout)
    deadline = time.monotonic() + LIMIT
    while os.path.exists(f"/proc/{watchdog}") and _state(watchdog) != "Z":
        assert time.monotonic() < deadline, f"process {watchdog} outlived the one that it watched over"


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
