"""The mutants of an area: drawn from all places by a seed, or written down."""

from __future__ import annotations

import difflib
import importlib
import random
from typing import NamedTuple, final

from tests.mutants.sampled.areas import AREAS
from tests.mutants.sampled.sites import Mutation, mutations
from tests.mutants.sampled.tree import ROOT

__all__ = ["STALE", "Mutant", "drawn", "written"]

STALE = "stale"
"""The kind of a written mutant whose place is gone."""


@final
class Mutant(NamedTuple):
    """`text` is the whole of the broken file."""

    path: str
    line: int
    kind: str
    text: str

    def diff(self) -> str:
        """Return the lines that changed, without what is around them."""
        old, new = (ROOT / self.path).read_text().splitlines(), self.text.splitlines()
        lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
        return "\n".join(line for line in lines if not line.startswith("@@"))


def drawn(area: str, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants: first a place is drawn, then what is done to it, so that no place counts for more than another."""
    texts = {path: (ROOT / path).read_text() for path in AREAS[area].paths()}
    by_place: dict[tuple[str, tuple[int, int, str]], list[Mutation]] = {}
    for path, text in texts.items():
        for mutation in mutations(text):
            by_place.setdefault((path, mutation.place), []).append(mutation)
    dice = random.Random(f"{area} {seed}")
    chosen = dice.sample(sorted(by_place), min(count, len(by_place)))
    return [_made(path, texts[path], dice.choice(by_place[path, place])) for path, place in chosen]


def _made(path: str, text: str, mutation: Mutation) -> Mutant:
    raw = text.encode()
    broken = raw[: mutation.start] + mutation.new.encode() + raw[mutation.end :]
    return Mutant(path, mutation.line, mutation.kind, broken.decode())


def written(area: str) -> list[Mutant]:
    """Return the mutants that a reader wrote for the area: (file, text that occurs in it once, what stands there instead)."""
    module = importlib.import_module(f"tests.mutants.sampled.written.{area.replace('-', '_')}")
    return [_replaced(*each) for each in module.MUTANTS]


def _replaced(path: str, old: str, new: str) -> Mutant:
    file = ROOT / path
    text = file.read_text() if file.exists() else ""
    if text.count(old) != 1:
        # The code has changed since: the mutant must be written again, and counts for nothing until then.
        return Mutant(path, 0, STALE, text)
    return Mutant(path, text[: text.index(old)].count("\n") + 1, "written", text.replace(old, new))
