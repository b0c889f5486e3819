"""Several threads at once, each with steps of its own, on stagers and rings that they share."""

from __future__ import annotations

import threading
from typing import Any, final

from tests.random_programs.content import Wrong
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import World

__all__ = ["ALL", "Threads"]


@final
class Threads(Kind):
    """Its branches are drawn and run as a program's steps are; `draw_steps` and `run_steps` are given by who draws and runs."""

    name = "threads"
    weight = 0.7
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        return self.of(sketch, threads=sketch.random.randint(2, 3), most=12) if sketch.names("stager") else []

    def of(self, sketch: Sketch, *, threads: int, most: int) -> list[Step]:
        """Return the step of so many threads, each of at most so many draws."""
        from tests.random_programs.draw import draw_steps

        name = sketch.name("n")
        branches = []
        for number in range(threads):
            child = Sketch(sketch.random, sketch.traits, sketch.palette, sketch, f"{name}{'abc'[number]}")
            branches.append(tuple(draw_steps(child, sketch.random.randint(2, most))))
        return [Step(self.name, {}, tuple(branches))]

    def run(self, world: World, **arguments: Any) -> None:
        from tests.random_programs.run import finish, run_steps

        failures: list[BaseException] = []

        def work(steps: tuple[Step, ...]) -> None:
            child = World(world.kit, world)
            try:
                run_steps(child, steps)
                finish(child)
            except BaseException as error:  # Whatever it is, it is the program's.
                failures.append(error)

        threads = [threading.Thread(target=work, args=(steps,), name="random-program") for steps in arguments["branches"]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            first = failures[0]
            if isinstance(first, Exception):
                raise first
            raise Wrong(f"a thread ended with {first!r}")


ALL: tuple[type[Kind], ...] = (Threads,)
