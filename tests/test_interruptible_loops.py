"""An interrupt that comes in a loop must not get past what the `try` or `with` around the loop does about it.

Python looks for interrupts where a loop jumps back. Compilers from 3.12 on leave some of these jumps out of the range that the
handler around the loop guards (of a loop that ends with a condition, for instance), so that a lock stays locked or memory under a
copy is given away. A loop in a function of its own, called from there, is guarded: the call is. Python 3.11 has no such jumps.
"""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAWS = ROOT / "xferlib" / "conformance" / "laws"
FILES = [path for folder in ("xferlib", "backends") for path in sorted((ROOT / folder).rglob("*.py")) if LAWS not in path.parents]

CAUGHT = {"BaseException", "KeyboardInterrupt"}
ENDS = ("RERAISE", "RETURN", "RAISE", "JUMP")
HARMLESS = ("PUSH_EXC_INFO", "SWAP", "POP_TOP", "STORE_FAST", "RERAISE", "COPY", "POP_EXCEPT", "CALL_INTRINSIC_1")


class Guards:
    """Which handler guards which instruction of a function."""

    def __init__(self, code: CodeType) -> None:
        bytecode = dis.Bytecode(code)
        self.instructions = list(bytecode)
        self.lines = {i.offset: i.positions.lineno for i in self.instructions if i.positions is not None}
        # Not in the stubs of `dis`: what the table of the function's exceptions says.
        self._ranges = bytecode.exception_entries  # type: ignore[attr-defined]

    def unguarded(self) -> Iterator[int | None]:
        """Yield the lines of loops whose jump back is not guarded as the loop is."""
        before = ""
        for instruction in self.instructions:
            if instruction.opname == "JUMP_BACKWARD" and not before.endswith("POP_EXCEPT POP_TOP POP_TOP"):
                handler = self._handler(instruction.argval)
                if handler is not None and handler != self._handler(instruction.offset):
                    yield self.lines[instruction.argval]
            # A `with` whose context manager has taken an error for itself jumps back as well, but ends with that.
            before = " ".join([*before.split()[-2:], instruction.opname])

    def _handler(self, offset: int) -> int | None:
        """Return where that handler begins that has something to do when an interrupt comes at this offset."""
        handler = self._innermost(offset)
        while handler is not None and not self._concerns_interrupts(handler):
            handler = self._innermost(handler)
        return handler

    def _innermost(self, offset: int) -> int | None:
        return next((found.target for found in self._ranges if found.start <= offset < found.end), None)

    def _concerns_interrupts(self, handler: int) -> bool:
        rest = itertools.dropwhile(lambda instruction: instruction.offset < handler, self.instructions)
        steps = []
        for step in rest:
            steps.append(step)
            if step.opname.startswith(ENDS):
                break
        names = {step.opname for step in steps}
        if "CHECK_EXC_MATCH" in names:
            return any(step.opname == "LOAD_GLOBAL" and str(step.argval) in CAUGHT for step in steps)
        return not names <= set(HARMLESS)


def functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from functions(constant)


def unguarded(source: str, name: str = "") -> list[str]:
    found = []
    for code in functions(compile(source, name, "exec")):
        if code.co_name != "<genexpr>":
            found += [f"{name}:{line} in {code.co_qualname}" for line in Guards(code).unguarded()]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_loop_is_guarded_to_its_last_jump(path: Path) -> None:
    assert unguarded(path.read_text(), str(path.relative_to(ROOT))) == []


SAMPLE = """
def with_a_loop(lock, things):
    with lock:
        for thing in things:
            if thing:
                thing()

def with_a_try(things):
    try:
        for thing in things:
            if thing:
                thing()
    finally:
        things.clear()

def catches_what_is_no_interrupt(things):
    try:
        while things:
            if things.pop():
                things.pop()
    except ValueError:
        things.clear()

def is_outside(lock, things):
    for thing in things:
        with lock:
            if thing:
                thing()
"""


def test_what_a_compiler_leaves_unguarded_is_found() -> None:
    found = [place.partition(" in ")[2] for place in unguarded(SAMPLE)]
    assert set(found) == ({"with_a_loop", "with_a_try"} if sys.version_info >= (3, 12) else set())
