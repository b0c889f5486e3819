"""Building the engine with its harness, by the system's C compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from xferlib.engine.building import SOURCES

__all__ = ["COMPILER", "ENGINE", "SANITIZERS", "TESTS", "built", "run"]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "xferlib" / "engine"
HARNESS = Path(__file__).with_name("harness.c")
COMPILER = shutil.which("cc")
OPTIONS = ("-std=c11", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-pthread")

SANITIZERS = {
    "plain": ("-O2",),
    "threads": ("-O1", "-fsanitize=thread"),
    "addresses": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
"""What judges a run beside the harness's own checks."""
SECONDS = 120
"""A run's longest time. What waits in the harness gives up long before."""


def tests() -> list[str]:
    """Return the names of the harness's tests."""
    text = HARNESS.read_text()
    return [part.split(")")[0] for part in text[text.index("TESTS[] = {") :].split("TEST(")[1:]]


TESTS = tests()


def built(folder: Path, sanitizer: str, sources: Mapping[str, str] | None = None, *, patience_seconds: int = 60) -> Path:
    """Build the harness into a folder and return the program. `sources`: text that takes the place of a file's."""
    assert COMPILER is not None
    files = []
    for name in SOURCES:
        file = ENGINE / name
        if sources and name in sources:
            file = folder / name
            file.write_text(sources[name])
        files.append(str(file))
    program = folder / "harness"
    # What a mutant leaves unused is no mistake of its.
    strict = () if sources else ("-Werror",)
    options = [*OPTIONS, *strict, *SANITIZERS[sanitizer], f"-DPATIENCE_SECONDS={patience_seconds}", f"-I{ENGINE}"]
    made = subprocess.run([COMPILER, *options, str(HARNESS), *files, "-o", str(program)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return program


def run(program: Path, name: str, *, seconds: float = SECONDS) -> tuple[int, str]:
    """Run one test, in a process of its own. Return its status, and what it printed."""
    environment = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "abort_on_error=0"}
    command = [str(program), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
        if "unexpected memory mapping" in done.stderr:
            # Where kernels spread memory wider than the sanitizer knows.
            command = ["setarch", platform.machine(), "-R", *command]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as error:
        return -1, f"no end after {seconds} s: {error.stderr!r}"
    return done.returncode, done.stdout + done.stderr
