"""Making a failing program short: steps are left out, in runs and then one by one, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.random_programs.program import Program, Step
from tests.random_programs.supervise import Failure, Runner

__all__ = ["shrink"]

TRIES = 3
"""How often a shorter program is run before it counts as one that does not fail: threads decide, too."""


def shrink(failure: Failure, runner: Runner, *, seconds: float = 60.0, tries: int = TRIES) -> Failure:
    """Return the failure of a shorter program that fails likewise, or the same one."""
    deadline = time.monotonic() + seconds
    best = failure
    program = Program.from_json(failure.program)

    def fails(shorter: Program) -> Failure | None:
        for _ in range(tries):
            if time.monotonic() > deadline:
                return None
            found = runner.run_text(shorter.to_json(), tidy=True)
            if found is not None and found.signature == failure.signature:
                return found
        return None

    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for ways in (_fewer_steps, _fewer_in_branches, _without_threads, _fewer_leaves):
            program, found = _reduce(program, ways, fails)
            if found is not None:
                changed, best = True, replace(found, seed=failure.seed, number=failure.number)
    # The next program begins in a process of its own.
    runner.close()
    return best


def _reduce(
    program: Program, ways: Callable[[Program], Iterator[Program]], fails: Callable[[Program], Failure | None]
) -> tuple[Program, Failure | None]:
    """Take shorter programs as long as some fail."""
    best = None
    while True:
        for shorter in ways(program):
            found = fails(shorter)
            if found is not None:
                program, best = shorter, found
                break
        else:
            return program, best


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """Yield runs of places to be left out, long ones first, the later ones first."""
    size = count
    while size:
        for start in range(count - size, -1, -size):
            yield start, start + size
        size //= 2


def _fewer_steps(program: Program) -> Iterator[Program]:
    steps = program.steps
    for start, end in _runs(len(steps)):
        if end - start < len(steps):
            yield program.with_steps(steps[:start] + steps[end:])


def _fewer_in_branches(program: Program) -> Iterator[Program]:
    for index, step in enumerate(program.steps):
        for number, branch in enumerate(step.branches):
            for start, end in _runs(len(branch)):
                branches = (*step.branches[:number], branch[:start] + branch[end:], *step.branches[number + 1 :])
                yield program.with_steps(_with(program.steps, index, replace(step, branches=branches)))


def _without_threads(program: Program) -> Iterator[Program]:
    """Let the steps of one thread be the program's own."""
    for index, step in enumerate(program.steps):
        for branch in step.branches:
            yield program.with_steps((*program.steps[:index], *branch, *program.steps[index + 1 :]))


def _fewer_leaves(program: Program) -> Iterator[Program]:
    """Make trees smaller: fewer of a group, or fewer groups."""
    for index, step in enumerate(program.steps):
        groups = step.arguments.get("groups")
        if not groups or step.arguments.get("form") == "leaf":
            continue
        for place, (count, *rest) in enumerate(groups):
            fewer = [[count // 2, *rest]] if count > 1 else []
            if fewer or len(groups) > 1:
                arguments = {**step.arguments, "groups": [*groups[:place], *fewer, *groups[place + 1 :]]}
                yield program.with_steps(_with(program.steps, index, replace(step, arguments=arguments)))


def _with(steps: tuple[Step, ...], index: int, step: Step) -> tuple[Step, ...]:
    return (*steps[:index], step, *steps[index + 1 :])
