"""From when on page-locking in place pays, and how doctor says so."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from xferlib_host import open_stager

import xferlib
from tests.mutants.laws.locking import LockingBackend
from xferlib.cli import breakeven, doctor, main
from xferlib.cli.breakeven import BreakEven, break_even

MIB = 1 << 20


class Gpu(LockingBackend):
    """A backend that says it is on a GPU, and counts locks of what is measured with."""

    def __init__(self) -> None:
        super().__init__(open_stager(), {})
        self.on_gpu = True
        self.locked_by_caller = 0

    def pin(self, address: int, nbytes: int) -> None:
        self.locked_by_caller += nbytes == breakeven.NBYTES
        super().pin(address, nbytes)


def seconds(lock: float, staged: float, pinned: float) -> BreakEven:
    return BreakEven(nbytes=64 * MIB, lock_seconds=lock, staged_seconds=staged, pinned_seconds=pinned)


@pytest.mark.parametrize(
    ("lock", "staged", "pinned", "transfers"),
    [(4.0, 3.0, 1.0, 2), (4.1, 3.0, 1.0, 3), (0.1, 3.0, 1.0, 1), (4.0, 1.0, 1.0, None), (4.0, 1.0, 1.5, None)],
)
def test_locking_pays_when_it_has_saved_what_it_cost(lock: float, staged: float, pinned: float, transfers: int | None) -> None:
    assert seconds(lock, staged, pinned).transfers == transfers


def test_it_is_said_in_words_with_the_figures() -> None:
    assert str(seconds(0.004, 0.003, 0.001)) == (
        "pin pays from 2 transfers of the same memory on: locking 64.0 MiB takes 4.0 ms, a put 1.0 ms then, 3.0 ms staged"
    )
    assert str(seconds(0.004, 0.001, 0.001)).startswith("pin never pays: ")


def test_it_is_measured_with_locks_and_with_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what chunks take.
    monkeypatch.setattr(breakeven, "NBYTES", 3 * MIB + 4096)
    backend = Gpu()
    with xferlib.stager(backend, pinned_limit=64 * MIB) as stager:
        found = break_even(stager)
        assert found is not None
        assert min(dataclasses.astuple(found)) > 0
        stats = stager.stats()
        puts = breakeven.SAMPLES + 1
        assert stats.h2d_nbytes == 2 * puts * found.nbytes
        assert stats.pinned_peak_nbytes > 0, "nothing was staged"
        assert backend.locked_by_caller == puts + 1
        assert stager._pool._reserved == {}, "a lock is left"


def test_where_nothing_is_locked_nothing_is_measured() -> None:
    with xferlib.stager("host") as stager:
        assert break_even(stager) is None
        assert stager.stats().h2d_nbytes == 0


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["doctor", *arguments])
    return " ".join(capsys.readouterr().out.split())


def test_doctor_says_plainly_that_nothing_is_locked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "host: nothing is page-locked here" in told(capsys)
    states = {state["name"]: state for state in json.loads(told(capsys, "--json"))["backends"]}
    assert states["host"]["pin"] is None


@pytest.mark.parametrize("fails", [False, True])
def test_doctor_tells_what_it_measured_or_why_not(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(stager: Any) -> BreakEven:
        if fails:
            raise xferlib.AllocationError("the device is full")
        return seconds(0.004, 0.003, 0.001)

    monkeypatch.setattr(doctor, "break_even", measured)
    states = {state["name"]: state for state in json.loads(told(capsys, "--json"))["backends"]}
    assert states["host"]["ready"] is True
    assert states["host"]["reason"] is None
    if fails:
        assert states["host"]["pin"] == {"error": "the device is full"}
        assert "host: could not be measured: the device is full" in told(capsys)
    else:
        assert states["host"]["pin"]["transfers"] == 2
        assert "host: pin pays from 2 transfers of the same memory on" in told(capsys)
