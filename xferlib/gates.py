"""Gates: words of shared memory that work waits on, opened by whoever shut them or, when overdue, by the watchdog's process.

Invariants: one table per process, never unmapped (a device may have it registered); a slot is handed out again only after its gate
was given back. This file does not make device work wait for a word.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Literal, final

from xferlib.watchdog import BY_TEST, BY_WATCHDOG, OPEN, SHUT, SLOT_NBYTES, TABLE_NBYTES

__all__ = ["GATE_SECONDS", "Gate", "GateTable", "gate_table"]

GATE_SECONDS = 8.0
"""After this long the watchdog opens a gate. Much longer than anything for which a law waits while a gate is shut."""


@final
class GateTable:
    """The words, and the process that watches over them. One per process: `gate_table()`."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("xferlib-gates")
        os.ftruncate(descriptor, TABLE_NBYTES)
        self._table = mmap.mmap(descriptor, TABLE_NBYTES)
        # One reference is never given back: unmapping a registered page leaves a registration that nothing can undo.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._table))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._table))
        self.words = memoryview(self._table).cast("I")
        self.deadlines = memoryview(self._table).cast("d")
        self.free = deque(range(TABLE_NBYTES // SLOT_NBYTES))
        for slot in self.free:
            self.words[slot * SLOT_NBYTES // 4] = OPEN
        try:
            self._watchdog = _start_watchdog(descriptor)
        finally:
            os.close(descriptor)
        atexit.register(self._end_watchdog)

    @property
    def watched(self) -> bool:
        """Whether the watchdog's process is alive."""
        return self._watchdog.poll() is None

    def _end_watchdog(self) -> None:
        assert self._watchdog.stdin is not None
        assert self._watchdog.stdout is not None
        self._watchdog.stdin.close()
        self._watchdog.stdout.close()
        self._watchdog.wait()


@final
class Gate:
    """Shut when made, then open for good: `open` opens it, or the watchdog does when it is overdue.

    `address` is that of a uint32 in host memory: 0 while shut, 1 once open.
    """

    def __init__(self, seconds: float = GATE_SECONDS) -> None:
        self._table = gate_table()
        if not self._table.watched:
            raise RuntimeError("the process that opens overdue gates has died: a gate shut now might never open")
        if not self._table.free:
            raise RuntimeError(f"all {TABLE_NBYTES // SLOT_NBYTES} gates are in use. Give them back with Gate.give_back()")
        self._slot = self._table.free.popleft()
        self._word = self._slot * SLOT_NBYTES // 4
        self.address = self._table.address + self._slot * SLOT_NBYTES
        self.seconds = seconds
        self._table.deadlines[self._slot * SLOT_NBYTES // 8 + 1] = time.monotonic() + seconds
        self._table.words[self._word + 1] = 0
        self._table.words[self._word] = SHUT

    @property
    def shut(self) -> bool:
        return self._table.words[self._word] == SHUT

    @property
    def opened_by(self) -> Literal["test", "watchdog"] | None:
        """Who opened the gate. "watchdog" means that what the test waited for did not come before the gate was overdue."""
        opener = self._table.words[self._word + 1]
        return "watchdog" if opener == BY_WATCHDOG else "test" if opener == BY_TEST else None

    def open(self) -> None:
        """Open the gate. Twice is fine; the first to open it is named."""
        if self.shut:
            self._table.words[self._word + 1] = BY_TEST
            self._table.words[self._word] = OPEN

    def give_back(self) -> None:
        """Let another gate use the word. Only when it is open and nothing on a device waits for it any more; use it no further."""
        self.open()
        self._table.free.append(self._slot)


@functools.cache
def gate_table() -> GateTable:
    """Return this process's table, making it and starting the watchdog on the first call."""
    return GateTable()


def _start_watchdog(descriptor: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("watchdog.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(descriptor), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
    )
    assert process.stdout is not None
    if process.stdout.read(1) != b"+":
        raise RuntimeError(f"the process that opens overdue gates did not start (exit status {process.wait()})")
    return process
