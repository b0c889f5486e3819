"""Parts of one device array overwritten, and what lies between them left alone."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from tests.random_programs.content import Array, Content, Wrong
from tests.random_programs.kinds.kind import Kind, refusable
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import World

__all__ = ["ALL"]

GAPS = (1, 8, 100, 255, 256, 257, 1000)
LENGTHS = (1, 100, 256, 1000, 4096, 65_536)


@final
class PutBetween(Kind):
    """Put into slices of one array, with gaps between them that are shorter and longer than those of our own layout."""

    name = "put_between"
    weight = 0.8

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if stager is None or not sketch.traits.put_into:
            return []
        random = sketch.random
        parts = [[random.choice(GAPS), random.choice(LENGTHS)] for _ in range(random.randint(2, 5))]
        return [self.step(stager=stager, owner=sketch.name("o"), parts=parts, pinned=sketch.chance(0.3))]

    def run(self, world: World, **arguments: Any) -> None:
        opened, parts, owner = world.stager(arguments["stager"]), arguments["parts"], arguments["owner"]
        want = Content(owner, 0, "uint8", (sum(map(sum, parts)) + 300,)).array().copy()
        array = world.kit.foreign(want.copy(), "C")
        sources: list[Array] = []
        targets: list[Any] = []
        end = 0
        with refusable(opened):
            for number, (gap, length) in enumerate(parts):
                start, end = end + gap, end + gap + length
                values = Content(f"{owner}.{number}", 0, "uint8", (length,)).array()
                source = opened.stager.empty_pinned(length, np.uint8) if arguments["pinned"] else np.empty(length, np.uint8)
                source[:] = want[start:end] = values
                sources.append(source)
                targets.append(array[start:end])
            opened.stager.put(sources, into=targets).synchronize()
        wrong = np.flatnonzero(world.kit.read(array) != want)
        if wrong.size:
            raise Wrong(f"put into slices: {wrong.size} bytes of the array are wrong, from {wrong[0]} on")


ALL: tuple[type[Kind], ...] = (PutBetween,)
