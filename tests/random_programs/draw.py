"""Drawing a program from a seed: all of it before any of it runs, so that it can be kept, printed and shortened."""

from __future__ import annotations

from random import Random

from tests.random_programs.kinds import KINDS
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.kinds.threads import Threads
from tests.random_programs.program import Program, Step
from tests.random_programs.sizes import Palette
from tests.random_programs.sketch import Sketch
from tests.random_programs.traits import Traits

__all__ = ["draw_program", "draw_steps"]

THRESHOLDS = (700, 700, 700, 100, 20, 5)
"""Allocations between two runs of the collector."""
UNLOCKED = (8 << 20, 1 << 20)
"""Bytes from which on results of a get are page-locked later: the product's own, and what smaller arrays reach."""
LATE_MICROSECONDS = (0, 50, 300, 2000)
"""By how much the streams of a large program are late at most, where they can be made so."""
MOST_TRIES = 4


def draw_program(traits: Traits, seed: int, number: int, *, large: bool = False) -> Program:
    """Return the program of this number. `large`: of those of large arrays, which several threads use."""
    if large:
        return _draw_large(traits, seed, number)
    random = Random(f"{traits.backend} {seed} {number}")
    palette = Palette(random, traits)
    sketch = Sketch(random, traits, palette)
    opening = [step for _ in range(random.randint(1, 3)) for step in KINDS["open"].draw(sketch)]
    count = min(int(random.lognormvariate(3.1, 0.6)) + 4, 120)
    steps = [*opening, *draw_steps(sketch, count)]
    options = {"threshold": random.choice(THRESHOLDS), "unlocked_from": random.choice(UNLOCKED)}
    return Program(traits.backend, tuple(steps), options)


def _draw_large(traits: Traits, seed: int, number: int) -> Program:
    """Draw a program of two stagers with limits, whose arrays have any size, and which three threads use at once."""
    random = Random(f"{traits.backend} {seed} {number} large")
    sketch = Sketch(random, traits, Palette(random, traits, large=True))
    steps = [step for _ in range(2) for step in KINDS["open"].draw(sketch)]
    steps += draw_steps(sketch, random.randint(2, 12))
    steps += KINDS["hold_copies"].draw(sketch) if random.random() < 0.4 else []
    steps += Threads().of(sketch, threads=3, most=30)
    steps += draw_steps(sketch, random.randint(0, 8))
    return Program(traits.backend, tuple(steps), {"late": random.choice(LATE_MICROSECONDS)})


def draw_steps(sketch: Sketch, count: int) -> list[Step]:
    """Draw at least so many steps, where there is anything to do."""
    random = sketch.random
    kinds = [kind for kind in KINDS.values() if kind.on_threads or not sketch.threaded]
    # Each program does some things often and others hardly: what needs three of a kind in a row comes about.
    weights = [kind.weight * random.choice((0.2, 1, 1, 1, 3)) for kind in kinds]
    steps: list[Step] = []
    for _ in range(count):
        steps += _step(sketch, kinds, weights)
    return steps


def _step(sketch: Sketch, kinds: list[Kind], weights: list[float]) -> list[Step]:
    for _ in range(MOST_TRIES):
        drawn = sketch.random.choices(kinds, weights)[0].draw(sketch)
        if drawn:
            return drawn
    return []
