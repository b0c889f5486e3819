"""Memory of others beside ours: see `canary`."""

from __future__ import annotations

from typing import Any, final

from tests.random_programs.content import raw
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import Skip, World

__all__ = ["ALL"]


@final
class MakeCanary(Kind):
    name = "canary"
    weight = 4.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        # As large as blocks of ours are, so that the same memory serves both.
        size = sketch.random.choice(sketch.palette.sizes)
        step = 1 << max(8, size.bit_length() - 4)
        nbytes = sketch.random.choice((size, -(-max(size, 1) // step) * step)) or 256
        name = sketch.add(sketch.name("c"), "canary")
        return [self.step(to=name, memory=sketch.random.choice(sketch.traits.canaries), nbytes=nbytes)]

    def run(self, world: World, **arguments: Any) -> None:
        name, nbytes = arguments["to"], arguments["nbytes"]
        pattern = raw(f"canary {name}", nbytes)
        world.canaries[name] = (world.kit.canaries[arguments["memory"]](pattern), pattern)


@final
class CheckCanaries(Kind):
    name = "check_canaries"
    weight = 1.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        return [self.step()] if sketch.names("canary") else []

    def run(self, world: World, **arguments: Any) -> None:
        world.check_canaries()


@final
class DropCanary(Kind):
    name = "drop_canary"
    weight = 2.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        name = sketch.pick("canary", own=True)
        if name is None:
            return []
        sketch.gone(name)
        return [self.step(canary=name)]

    def run(self, world: World, **arguments: Any) -> None:
        if arguments["canary"] not in world.canaries:
            raise Skip("there is no such canary")
        world.check_canaries()
        canary, _ = world.canaries.pop(arguments["canary"])
        canary.free()


ALL: tuple[type[Kind], ...] = (MakeCanary, CheckCanaries, DropCanary)
