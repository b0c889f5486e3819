"""`StagerConformance`: the hooks that an author writes and the laws that nobody may override.

A law that a backend cannot keep is listed in `known_failures` with a reason. That law must then fail: the day it passes, the suite
fails.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from xferlib.conformance.hooks import Hooks
from xferlib.conformance.laws.close import CloseLaws
from xferlib.conformance.laws.content import ContentLaws
from xferlib.conformance.laws.done import DoneLaws
from xferlib.conformance.laws.failures import FailureLaws
from xferlib.conformance.laws.flags import FlagLaws
from xferlib.conformance.laws.freedom import FreedomLaws
from xferlib.conformance.laws.hook_checks import HookChecks
from xferlib.conformance.laws.mapped_memory import MappedLaws
from xferlib.conformance.laws.order import OrderLaws
from xferlib.conformance.laws.overlap import OverlapLaws
from xferlib.conformance.laws.ownership import OwnershipLaws
from xferlib.conformance.laws.pinned import PinnedLaws
from xferlib.conformance.laws.quiet import QuietLaws
from xferlib.conformance.laws.reuse import ReuseLaws

__all__ = ["StagerConformance"]

YOURS = {"deadline_seconds"}
"""What the suite defines and a subclass may set."""
OURS = ("test_law", "test_hook")
"""How tests of the suite begin."""
EXCUSES = {"skip", "skipif", "xfail"}


class StagerConformance(
    # In reverse: pytest runs first what is inherited last.
    OwnershipLaws,
    MappedLaws,
    QuietLaws,
    FailureLaws,
    FlagLaws,
    CloseLaws,
    PinnedLaws,
    ReuseLaws,
    OrderLaws,
    OverlapLaws,
    DoneLaws,
    FreedomLaws,
    ContentLaws,
    HookChecks,
):
    """The laws, for a backend whose `Hooks` a subclass writes. Name the subclass `Test...`, and pytest collects it.

    A subclass may have tests of its own under other names. It may not replace anything of the suite's, nor excuse itself from tests
    by marks: then the class statement raises `TypeError`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_overrides(cls)
        _check_excuses(cls)


def _check_overrides(cls: type[StagerConformance]) -> None:
    """Refuse a class that changes the laws."""
    suite = set(dir(StagerConformance)) - set(dir(Hooks)) - YOURS
    # Not by getattr: fixtures are descriptors, which give another object each time.
    static = inspect.getattr_static
    replaced = sorted(name for name in suite if static(cls, name) is not static(StagerConformance, name))
    if replaced:
        raise TypeError(
            f"{cls.__name__} replaces {', '.join(replaced)} of the suite: a law is not overridden. List a test that fails in "
            "known_failures, with the reason"
        )
    invented = sorted(name for name in dir(cls) if name.startswith(OURS) and name not in suite)
    if invented:
        raise TypeError(
            f"{cls.__name__} defines {', '.join(invented)}: test_law... and test_hook... are names of the suite. "
            "Give tests of yours other names"
        )


def _check_excuses(cls: type[StagerConformance]) -> None:
    """Refuse a class that excuses itself from a law in any other way than by naming a test and a reason."""
    unknown = sorted(set(cls.known_failures) - set(_test_names()))
    if unknown:
        raise TypeError(f"{cls.__name__}.known_failures names no test of the suite: {', '.join(unknown)}. Remove what is obsolete")
    unexplained = sorted(name for name, reason in cls.known_failures.items() if not reason.strip())
    if unexplained:
        raise TypeError(f"{cls.__name__}.known_failures gives no reason for {', '.join(unexplained)}. Say why, with a link")
    excused = sorted(EXCUSES & {mark.name for mark in _marks(cls)})
    if excused:
        raise TypeError(f"{cls.__name__} is marked {', '.join(excused)}: only open() may skip, by BackendUnavailableError")


def _test_names() -> Iterator[str]:
    """Yield what known_failures may name: every test, and every case of a test as pytest spells it."""
    for name in dir(StagerConformance):
        if not name.startswith(OURS):
            continue
        yield name
        marks = [mark for mark in _marks(getattr(StagerConformance, name)) if mark.name == "parametrize"]
        for case in itertools.product(*(mark.args[1] for mark in marks)):
            if case:
                yield f"{name}[{'-'.join(map(str, case))}]"


def _marks(marked: Any) -> list[Any]:
    marks = getattr(marked, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]
