"""What mutants are made of, and the list of them.

A mutant breaks one promise: a backend behind a wall that passes everything else on, or a piece of the core that is replaced while
the test runs. It names the tests that must fail by it. All else about it is honest: nothing but the law can have found it out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import pytest

from xferlib import protocol
from xferlib.conformance import StagerConformance

__all__ = [
    "DEADLINE_SECONDS",
    "MUTANTS",
    "BrokenBackend",
    "BrokenEvent",
    "BrokenEvents",
    "KeepsTheInterpreter",
    "Mutant",
    "broken_backend",
    "broken_core",
    "broken_hooks",
    "honest",
]

DEADLINE_SECONDS = 0.5
"""A mutant that never gets there is waited for no longer. That an honest one gets there is for the honest ones to show."""

C = TypeVar("C", bound=type)
H = TypeVar("H", bound=type[StagerConformance])
F = TypeVar("F", bound=Callable[[pytest.MonkeyPatch], None])


@final
@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`tests` must fail when `hooks` open a backend behind `wall`, or with the core as `patch` leaves it."""

    tests: tuple[str, ...]
    hooks: type[StagerConformance]
    wall: Callable[[Any], Any] = lambda honest: honest
    patch: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    @property
    def laws(self) -> set[int]:
        return {int(test.removeprefix("test_law")[:2]) for test in self.tests if test.startswith("test_law")}

    def make_tests(self, name: str) -> type[StagerConformance]:
        """Return the class that pytest is to collect."""
        mutant, hooks = self, self.hooks

        def open_broken(self: StagerConformance) -> Any:
            return mutant.wall(hooks.open(self))

        @pytest.fixture(autouse=True)
        def break_core(self: StagerConformance, monkeypatch: pytest.MonkeyPatch) -> None:
            mutant.patch(monkeypatch)

        deadline = hooks.deadline_seconds if name.startswith("TestHonest") else DEADLINE_SECONDS
        made = type(name, (hooks,), {"deadline_seconds": deadline, "open": open_broken, "break_core": break_core})
        assert issubclass(made, StagerConformance)
        return made


MUTANTS: dict[str, Mutant] = {}
"""By the name of the class that is collected."""


def honest(mutants: Mapping[str, Mutant]) -> dict[str, Mutant]:
    """Return, by the name of a class to be collected, the hooks that mutants are built on, with the tests that the mutants fail."""
    tests: dict[type[StagerConformance], dict[str, None]] = {}
    for mutant in mutants.values():
        if not any(test.startswith("test_hook_") for test in mutant.tests):
            tests.setdefault(mutant.hooks, {}).update(dict.fromkeys(mutant.tests))
    return {f"TestHonest{hooks.__name__}": Mutant(tests=tuple(names), hooks=hooks) for hooks, names in tests.items()}


def broken_backend(*tests: str, hooks: type[StagerConformance]) -> Callable[[C], C]:
    """List a `BrokenBackend` as the mutant by which these tests of the honest hooks fail."""

    def listed(wall: C) -> C:
        assert wall.__doc__, "a mutant says what it does wrong"
        MUTANTS[f"Test{wall.__name__}"] = Mutant(tests=tests, hooks=hooks, wall=wall)
        return wall

    return listed


def broken_hooks(*tests: str) -> Callable[[H], H]:
    """List hooks as the mutant by which these tests of an honest backend fail."""

    def listed(hooks: H) -> H:
        assert hooks.__doc__, "a mutant says what it does wrong"
        MUTANTS[f"Test{hooks.__name__}"] = Mutant(tests=tests, hooks=hooks)
        return hooks

    return listed


def broken_core(*tests: str, hooks: type[StagerConformance]) -> Callable[[F], F]:
    """List a function that breaks the core as the mutant by which these tests of the honest hooks fail."""

    def listed(patch: F) -> F:
        assert patch.__doc__, "a mutant says what it does wrong"
        MUTANTS[f"Test_{patch.__name__}"] = Mutant(tests=tests, hooks=hooks, patch=patch)
        return patch

    return listed


class BrokenBackend:
    """An honest backend behind a wall. A subclass replaces what it breaks, and may use `inner`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class KeepsTheInterpreter(BrokenBackend):
    """Gives memory back by a call that waits, and keeps every other thread from running meanwhile."""

    stood = False

    def stand_still(self) -> None:
        if not self.stood:
            self.stood = True
            ctypes.PyDLL(None).usleep(int(2e6 * DEADLINE_SECONDS))

    def free_device(self, block: protocol.DeviceBlock) -> None:
        self.stand_still()
        self.inner.free_device(block)

    def free_pinned(self, address: int) -> None:
        self.stand_still()
        self.inner.free_pinned(address)

    def unpin(self, address: int) -> None:
        self.stand_still()
        self.inner.unpin(address)


class BrokenEvent:
    """An honest event behind a wall, likewise."""

    def __init__(self, inner: protocol.Event) -> None:
        self.inner = inner

    def done(self) -> bool:
        return self.inner.done()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def stream_wait(self, stream: object | None = None) -> protocol.Stream | None:
        return self.inner.stream_wait(stream)


class BrokenEvents(BrokenBackend):
    """Every event of its copy streams is of the class that a subclass names."""

    event: type[BrokenEvent]

    def record_h2d(self) -> BrokenEvent:
        return self.event(self.inner.record_h2d())

    def record_d2h(self) -> BrokenEvent:
        return self.event(self.inner.record_d2h())
