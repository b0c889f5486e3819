"""What a kind of step is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import xferlib
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import Opened, Skip, World

__all__ = ["Kind", "as_current", "refusable"]


class Kind(ABC):
    """One kind of step, without state. `weight`: how often it is tried, against the others."""

    name: ClassVar[str]
    weight: ClassVar[float]
    on_threads: ClassVar[bool] = True
    """Whether several threads may do it at once, to stagers that they share."""

    @abstractmethod
    def draw(self, sketch: Sketch) -> list[Step]:
        """Draw a step, with those that it needs around it, and note in the sketch what they make. Empty: there is nothing to do."""

    @abstractmethod
    def run(self, world: World, **arguments: Any) -> None:
        """Do it. Raises `Skip` where a step that it needs was left out, and `Wrong` where a promise is broken."""

    def step(self, **arguments: Any) -> Step:
        return Step(self.name, arguments)


@contextmanager
def refusable(opened: Opened) -> Iterator[None]:
    """Skip the step where a stager with limits refuses for want of memory."""
    try:
        yield
    except xferlib.AllocationError as error:
        if not opened.tight:
            raise
        raise Skip(f"refused: {error}") from None


@contextmanager
def as_current(world: World, name: str | None) -> Iterator[None]:
    """Make a stream the current one."""
    if name is None:
        yield
        return
    with world.kit.current(world.stream(name)):
        yield
