"""Building the engine with its harness, by the compiler that the library is built by; as a command, telling what it cannot try."""

from __future__ import annotations

import atexit
import functools
import platform
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from xferlib.engine.building import SOURCES, ZIG, compiler

__all__ = ["COMPILER", "ENGINE", "NOT_TRIED", "SANITIZERS", "TESTS", "built", "run", "untried"]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "xferlib" / "engine"
HARNESS = Path(__file__).with_name("harness.c")
COMPILER = compiler()
OPTIONS = ("-std=c11", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-pthread")

SANITIZERS = {
    "plain": ("-O2",),
    "threads": ("-O1", "-fsanitize=thread"),
    "addresses": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
"""What judges a run beside the harness's own checks."""
NOT_TRIED: dict[str, str] = {}
"""Those that the compiler has not, and what is said instead."""
if COMPILER and "ziglang" in COMPILER:
    SANITIZERS["undefined"] = ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    NOT_TRIED["addresses"] = "NOT TRIED: AddressSanitizer. Zig takes the option, and has no library for it: install gcc."
SECONDS = 120
"""A run's longest time. What waits in the harness gives up long before."""


def untried() -> str:
    """Return what is said of the engine's own tests where some are left out; empty: none is."""
    if COMPILER is None:
        return f"NOT TRIED: the engine's own tests. They want a C compiler: install gcc, or: pip install '{ZIG}'"
    return " ".join(NOT_TRIED.values())


def tests() -> list[str]:
    """Return the names of the harness's tests."""
    text = HARNESS.read_text()
    return [part.split(")")[0] for part in text[text.index("TESTS[] = {") :].split("TEST(")[1:]]


TESTS = tests()
_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
_compiling = threading.Lock()


def built(
    folder: Path,
    sanitizer: str,
    sources: Mapping[str, str] | None = None,
    *,
    patience_seconds: int = 60,
    options: Sequence[str] = (),
) -> Path:
    """Build the harness into a folder and return the program. `sources`: text that takes the place of a file's."""
    files = [_unchanged(HARNESS, sanitizer, patience_seconds)]
    for name in SOURCES:
        if sources and name in sources:
            file = folder / name
            file.write_text(sources[name])
        else:
            file = _unchanged(ENGINE / name, sanitizer)
        files.append(file)
    program = folder / "harness"
    # No -Werror: what a mutant leaves unused is no mistake of its.
    _compile([*SANITIZERS[sanitizer], *options, *map(str, files), "-o", str(program)])
    return program


def _unchanged(source: Path, sanitizer: str, patience_seconds: int | None = None) -> Path:
    """Compile a file as it is, once: it is linked again and again with what was changed. Any thread."""
    with _compiling:
        return _compiled(source, sanitizer, patience_seconds)


@functools.cache
def _compiled(source: Path, sanitizer: str, patience_seconds: int | None) -> Path:
    made = Path(_FOLDER.name) / f"{source.stem}-{sanitizer}-{patience_seconds}.o"
    patience = [] if patience_seconds is None else [f"-DPATIENCE_SECONDS={patience_seconds}"]
    _compile(["-Werror", *SANITIZERS[sanitizer], *patience, "-c", str(source), "-o", str(made)])
    return made


def _compile(options: list[str]) -> None:
    assert COMPILER is not None
    command = [*COMPILER, *OPTIONS, f"-I{ENGINE}", *options]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


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


if __name__ == "__main__":
    print(untried())
