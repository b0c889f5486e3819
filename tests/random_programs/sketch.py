"""What is known of a program while it is drawn: the things that its steps have made so far, by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias, final

from tests.random_programs.sizes import Palette
from tests.random_programs.traits import Traits

__all__ = ["Seen", "Sketch"]

Seen: TypeAlias = dict[str, Any]
"""`kind`, and what steps need to know to use it: `groups` of leaves, `stager`, `device`, and so on."""


@final
class Sketch:
    """One program's, or one thread's: that may use what its parent has, and not change it."""

    def __init__(self, random: Random, traits: Traits, palette: Palette, parent: Sketch | None = None, prefix: str = "") -> None:
        self.random = random
        self.traits = traits
        self.palette = palette
        self.parent = parent
        self._prefix = prefix
        self._things: dict[str, Seen] = {}
        self._count = 0

    @property
    def threaded(self) -> bool:
        return self.parent is not None

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{self._prefix}{letter}{self._count}"

    def add(self, name: str, kind: str, **known: Any) -> str:
        self._things[name] = {"kind": kind, **known}
        return name

    def gone(self, name: str) -> None:
        self._things.pop(name, None)

    def seen(self, name: str) -> Seen:
        found = self._things.get(name)
        if found is None and self.parent is not None:
            return self.parent.seen(name)
        assert found is not None
        return found

    def names(self, kind: str, where: Callable[[Seen], bool] = lambda seen: True, *, own: bool = False) -> list[str]:
        found = [name for name, seen in self._things.items() if seen["kind"] == kind and where(seen)]
        return found if own or self.parent is None else [*self.parent.names(kind, where), *found]

    def pick(self, kind: str, where: Callable[[Seen], bool] = lambda seen: True, *, own: bool = False) -> str | None:
        """Draw one of a kind, of the later ones rather; None if there is none."""
        names = self.names(kind, where, own=own)
        if not names:
            return None
        return self.random.choice(names[-4:] if self.random.random() < 0.6 else names)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def stream(self, device: int) -> str | None:
        """Draw a stream to be named, of the program's own or of what is held; mostly none."""
        if not self.traits.streams or device or self.chance(0.55):
            return None
        return self.pick("stream") if self.chance(0.4) else self.pick("hold", lambda seen: seen["compute"])

    def current(self, device: int) -> str | None:
        """Draw a stream to be the current one; mostly none."""
        if not self.traits.has_current or device or self.chance(0.85):
            return None
        return self.pick("stream")
