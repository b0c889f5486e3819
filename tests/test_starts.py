"""A process that the kernel could not start is started again, once, and only then."""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import Any

import pytest

COMMAND = [sys.executable, "-S", "-c", "print(7)"]


class Kernel:
    """Refuses the first starts, with a number as the cause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int, number: int) -> None:
        self.starts = 0
        self._refusals, self._number = refusals, number
        self._execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        monkeypatch.setattr(subprocess.Popen, "_execute_child", lambda *arguments: self._start(*arguments))

    def _start(self, *arguments: Any) -> None:
        self.starts += 1
        if self.starts <= self._refusals:
            raise OSError(self._number, "refused")
        self._execute(*arguments)


def test_what_the_kernel_could_not_read_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 1, errno.EFAULT)
    assert subprocess.run(COMMAND, capture_output=True, check=True).stdout == b"7\n"
    assert kernel.starts == 2


def test_it_is_not_tried_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 2, errno.EFAULT)
    with pytest.raises(OSError, match="refused"):
        subprocess.run(COMMAND, capture_output=True)
    assert kernel.starts == 2


def test_another_error_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 1, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        subprocess.run(COMMAND, capture_output=True)
    assert kernel.starts == 1
