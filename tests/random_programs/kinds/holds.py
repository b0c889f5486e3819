"""Copies and compute that are held, readers behind them, and arrays that held work makes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, final

from tests.random_programs.content import Content
from tests.random_programs.hangs import begin_hold, end_hold
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.kinds.puts import put_alike
from tests.random_programs.program import Step
from tests.random_programs.release import RELEASER
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import HOST, Device, Hold, Reader, Skip, World

__all__ = ["ALL"]


def enter(world: World, name: str, context: Any) -> Hold:
    if len(world.holds) >= world.kit.holds:
        raise Skip("enough is held")

    def release() -> None:
        world.release_all()
        world.kit.open_gates()

    with ExitStack() as stack:
        begin_hold()
        stack.callback(end_hold)
        stack.enter_context(world.kit.while_held())
        # Behind what is held as soon as the gate is shut, this may wait for another thread's call, which waits for just that.
        with RELEASER.watch(world.kit.patience, release):
            entered = stack.enter_context(context)
        hold = world.holds[name] = Hold(stack.pop_all(), entered)
    return hold


@final
class HoldCopies(Kind):
    name = "hold_copies"
    weight = 3.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if stager is None or len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        return [self.of(sketch, stager, sketch.random.choice(("h2d", "d2h", "both")))]

    def of(self, sketch: Sketch, stager: str, direction: str) -> Step:
        """Return the step that holds this stager's copies."""
        return self.step(to=sketch.add(sketch.name("k"), "hold", compute=False), stager=stager, direction=direction)

    def run(self, world: World, **arguments: Any) -> None:
        backend = world.stager(arguments["stager"]).stager.backend
        enter(world, arguments["to"], world.kit.hooks.hold_copies(backend, arguments["direction"]))


@final
class HoldCompute(Kind):
    name = "hold_compute"
    weight = 3.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if stager is None or len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        return [self.of(sketch, stager)]

    def of(self, sketch: Sketch, stager: str) -> Step:
        """Return the step that holds work by this stager's device."""
        return self.step(to=sketch.add(sketch.name("k"), "hold", compute=True), stager=stager)

    def run(self, world: World, **arguments: Any) -> None:
        backend = world.stager(arguments["stager"]).stager.backend
        enter(world, arguments["to"], world.kit.hooks.hold_compute(backend))


@final
class HoldArray(Kind):
    """Make a device array that held work fills."""

    name = "hold_array"
    weight = 1.5
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if stager is None or len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        nbytes = sketch.random.choice(sketch.traits.held_sizes or (257, 4096, 70_000))
        hold = sketch.add(sketch.name("k"), "hold", compute=sketch.traits.streams)
        known = {"groups": [[1, "uint8", [nbytes], "C", "pinned"]], "form": "leaf", "device": 0, "foreign": True}
        array = sketch.add(sketch.name("d"), "device", **known, views=())
        return [self.step(to=array, hold=hold, stager=stager, nbytes=nbytes)]

    def run(self, world: World, **arguments: Any) -> None:
        backend = world.stager(arguments["stager"]).stager.backend
        content = Content(arguments["to"], 0, "uint8", (arguments["nbytes"],))
        name = arguments["hold"]
        hold = enter(world, name, world.kit.hooks.held_array(backend, content.array().copy()))
        device = Device([hold.hold.array], [[content]], form="leaf", device=0)
        device.order, device.foreign = {name}, True
        world.things[arguments["to"]] = device


@final
class Release(Kind):
    name = "release"
    weight = 4.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        hold = sketch.pick("hold", own=True)
        return [] if hold is None else [self.of(sketch, hold)]

    def of(self, sketch: Sketch, hold: str) -> Step:
        """Return the step that releases what is held."""
        sketch.gone(hold)
        return self.step(hold=hold)

    def run(self, world: World, **arguments: Any) -> None:
        world.end_hold(arguments["hold"])


@final
class Read(Kind):
    """Let held work read an array, on a stream that its transfer was told of; the array may be dropped meanwhile."""

    name = "read"
    weight = 6.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        hold = sketch.pick("hold", lambda seen: seen["compute"])
        source = sketch.pick("device", lambda seen: seen["device"] == 0 and not seen["views"])
        if hold is None or source is None:
            return []
        leaves = sum(group[0] for group in sketch.seen(source)["groups"])
        step = self.step(hold=hold, source=source, index=sketch.random.randrange(leaves))
        if not sketch.chance(0.6):
            return [step]
        # What dies while it is read is the matter, and what is put then, which must not lie in its place.
        drop = [source, *sketch.names("transfer", lambda seen: seen.get("given") == source)]
        seen = sketch.seen(source)
        for name in drop:
            sketch.gone(name)
        steps = [step, Step("drop", {"names": drop})]
        if sketch.chance(0.7):
            steps += put_alike(sketch, seen)
        return steps

    def run(self, world: World, **arguments: Any) -> None:
        hold, device, index = world.holds.get(arguments["hold"]), world.find(arguments["source"], Device), arguments["index"]
        if hold is None or index >= len(device.arrays) or not device.plain or device.device:
            raise Skip("it cannot be read")
        content = device.content(index)
        sizes = world.kit.held_sizes
        if sizes and (content.dtype, len(content.shape), math.prod(content.shape) in sizes) != ("uint8", 1, True):
            raise Skip("to read it a function would be compiled")
        if 0 in content.shape:
            raise Skip("it has no bytes")
        array = device.arrays[index]
        named = self._name(world, device, arguments["hold"])
        keep = None if named else array
        world.readers.append(Reader(arguments["hold"], world.kit.read_later(array, hold.hold), content, keep, device.cells[index]))

    def _name(self, world: World, device: Device, hold: str) -> bool:
        """Tell the array's transfer of the stream. False: nobody can, so the reader is the program's to wait for."""
        if not world.kit.flags.streams or hold in device.order:
            return not device.foreign
        if device.started is not None and not device.foreign:
            device.started.transfer.stream_wait(world.stream(hold))
            device.order.add(hold)
            return True
        if HOST not in device.order:
            raise Skip("nobody can name the stream")
        return False


ALL: tuple[type[Kind], ...] = (HoldCopies, HoldCompute, HoldArray, Release, Read)
