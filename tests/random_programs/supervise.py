"""The process that has programs run by another: a crash or a hang of that one is a failure with a traceback, and not the end."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, final

__all__ = ["Failure", "Runner", "Unavailable"]

ROOT = Path(__file__).resolve().parents[2]
SILENCE_SECONDS = 90.0
"""Longer than the worker waits for itself."""
START_SECONDS = 300.0
LOG_CHARACTERS = 40_000
"""Room for the tracebacks of some dozens of threads."""
FREED = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TOP_PAD_": "0", "MALLOC_PERTURB_": "165"}
"""For the malloc of glibc: what is freed is overwritten, or unmapped at once if the heap had no room for it. Without the second of
them it has room for most of what is smaller than 128 KiB. So a copy that still uses such memory is not right by luck."""


class Unavailable(Exception):
    """The backend cannot be opened here."""


@final
@dataclass(frozen=True)
class Failure:
    """A program that failed. `number` is None for one that was given and not drawn."""

    seed: int | None
    number: int | None
    message: str
    at: str
    trace: str
    program: str
    """As JSON."""

    @property
    def signature(self) -> str:
        """The same for failures that look alike."""
        words = self.message.split("\n")[0].split(";")[0]
        return re.sub(r"[0-9]+", "#", re.sub(r"\b[a-z]+\d+[a-z0-9]*\b", "@", words))[:110]


@final
class Runner:
    """Runs programs in a process, another one after each failure. A context manager."""

    def __init__(
        self,
        backend: str,
        environment: dict[str, str] | None = None,
        *,
        large: bool = False,
        root: Path = ROOT,
        defect: str | None = None,
    ) -> None:
        """`large`: see `draw_program`. `root`: the checkout whose programs, and whose library, are run. `defect`: see `defects`."""
        self._arguments = [backend] if defect is None else [backend, defect]
        self.backend = backend
        self.large = large
        self.on_gpu = False
        self.rss: list[int] = []
        """Of the process that runs now, after each program."""
        self._environment = {**FREED, **os.environ, **(environment or {})}
        self._root = root
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def run(self, seed: int, number: int) -> tuple[dict[str, Any], Failure | None]:
        """Draw and run one program."""
        return self._run({"seed": seed, "number": number, "large": self.large}, seed, number)

    def run_text(self, program: str, *, tidy: bool = False) -> Failure | None:
        """Run a program that is given as JSON. `tidy`: in the same process as the last, also after a failure."""
        return self._run({"program": program, "tidy": tidy}, None, None)[1]

    def draw(self, seed: int, number: int) -> str:
        """Return the program as JSON, without running it."""
        answer = self._ask({"seed": seed, "number": number, "large": self.large, "only_draw": True})
        if answer is None:
            raise RuntimeError(f"the worker ended while it drew program {number} of seed {seed}: {self._end()}")
        program: str = answer["program"]
        return program

    def _run(self, request: dict[str, Any], seed: int | None, number: int | None) -> tuple[dict[str, Any], Failure | None]:
        answer = self._ask(request)
        if answer is None:
            log = self._end()
            program = request.get("program") or self.draw(request["seed"], request["number"])
            kind = "the program hung" if "Timeout (" in log else "the process died"
            return {}, Failure(seed, number, _died(kind, log), "", log, program)
        self.rss.append(answer["rss"])
        if answer["failure"] is None:
            return answer, None
        trace = answer["trace"] + self._where()
        if not request.get("tidy"):
            self.close()
        return answer, Failure(seed, number, answer["failure"], answer["at"], trace, answer["program"])

    def _where(self) -> str:
        """Return what the process told of where everybody was, while something was held for too long."""
        assert self._log is not None
        self._log.seek(0)
        _, found, told = self._log.read().partition("Timeout (")
        return found + told[-LOG_CHARACTERS:]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None if the process ended, or says nothing any more."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
        except BrokenPipeError:
            return None
        return self._line(process, SILENCE_SECONDS)

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # It is open as long as the process runs.
        self.rss.clear()
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.random_programs.worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._root,
            env=self._environment,
        )
        first = self._line(process, START_SECONDS)
        if first is None:
            raise RuntimeError(f"the worker did not start: {self._end()}")
        if "unavailable" in first:
            self.close()
            raise Unavailable(first["unavailable"])
        self.on_gpu = first["on_gpu"]
        return process

    def _line(self, process: subprocess.Popen[str], seconds: float) -> dict[str, Any] | None:
        assert process.stdout is not None
        # One answer for each request: nothing is left in the buffer.
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else ""
        found: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return found

    def _end(self) -> str:
        """End the process and return the end of its log."""
        process, log = self._process, self._log
        assert process is not None
        assert log is not None
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
        log.seek(0)
        text = log.read()
        self.close()
        return f"exit status {status}\n{text[-LOG_CHARACTERS:]}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin, process.stdout:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _died(kind: str, log: str) -> str:
    """Say where the process was: by functions of the library's on the thread that failed, or on the main one."""
    threads = re.split(r"\n(?=(?:Current t|T)hread 0x)", log)
    mine = next((text for text in threads if text.startswith("Current")), threads[-1])
    # Not by the others: in which order they stand is chance.
    places = list(_places(mine)) or list(_places(threads[-1]))
    return f"{kind} in {' < '.join(places[:3])}" if places else f"{kind}: {log.splitlines()[0]}"


def _places(log: str) -> Iterator[str]:
    for line in log.splitlines():
        if line.startswith('  File "') and "/xferlib" in line:
            yield f"{Path(line.split(chr(34))[1]).name}:{line.rsplit(' in ', 1)[-1]}"
