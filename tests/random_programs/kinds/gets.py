"""Transfers to the host."""

from __future__ import annotations

import math
from typing import Any, final

from tests.random_programs.kinds.holds import HoldCopies, Release
from tests.random_programs.kinds.hosts import CheckHost, Make
from tests.random_programs.kinds.kind import Kind, as_current, refusable
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.trees import built
from tests.random_programs.world import Device, Host, Skip, Started, World

__all__ = ["ALL"]

SIZES = (4096, 64 << 10, 256 << 10)
OUTS = ("pinned", "pageable", "memmap", "view")


@final
class Get(Kind):
    """Get device arrays, by whatever stager of their device, into new pinned memory or into host arrays of every kind."""

    name = "get"
    weight = 8.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("device")
        if source is None:
            return []
        seen = sketch.seen(source)
        stager = sketch.pick("stager", lambda other: other["device"] == seen["device"])
        if stager is None:
            return []
        steps: list[Step] = []
        out = None
        if sketch.chance(0.4):
            memory = sketch.random.choice(OUTS)
            groups = [[count, dtype, shape, "C", memory] for count, dtype, shape, *_ in seen["groups"]]
            steps.append(Make().made(sketch, stager, groups, seen["form"]))
            out = steps[0].arguments["to"]
        elif sketch.chance(0.2):
            out = self._alike(sketch, seen["groups"], seen["form"])
        stream = sketch.stream(seen["device"])
        current = None if stream else sketch.current(seen["device"])
        return [*steps, self.of(sketch, stager, source, out, stream=stream, current=current)]

    def of(self, sketch: Sketch, stager: str, source: str, out: str | None, **streams: str | None) -> Step:
        """Return the step that gets this. `streams`: the `stream` that is named, or the one that is `current`."""
        seen = sketch.seen(source)
        known = {"groups": seen["groups"], "form": seen["form"], "device": seen["device"], "stager": stager}
        name = sketch.add(sketch.name("t"), "transfer", **known, to_host=True, into=out)
        return self.step(to=name, stager=stager, source=source, out=out, **streams)

    def _alike(self, sketch: Sketch, groups: list[Any], form: str) -> str | None:
        """Draw host arrays that are there, a ring's slot among them, for the result."""
        shapes = [group[:3] for group in groups]

        def fits(other: dict[str, Any]) -> bool:
            same = other["form"] == form and [group[:3] for group in other["groups"]] == shapes
            return same and all(group[3] == "C" and group[4] != "readonly" for group in other["groups"])

        return sketch.pick("host", fits, own=True)

    def run(self, world: World, **arguments: Any) -> None:
        opened, device = world.stager(arguments["stager"]), world.find(arguments["source"], Device)
        if device.device != opened.device:
            raise Skip("it is on another device")
        out = None if arguments.get("out") is None else world.find(arguments["out"], Host, own=True)
        stream = arguments.get("stream")
        with as_current(world, arguments.get("current")):
            world.may_use(device, stream if arguments.get("current") is None else arguments["current"])
            if out is not None:
                self._prepare(world, out, device)
            with refusable(opened):
                tree = built(device.form, device.arrays)
                transfer = opened.stager.get(tree, out=None if out is None else out.tree, stream=world.stream(stream))
        contents = [device.content(index) for index in range(len(device.arrays))]
        started = Started(transfer, contents, form=device.form, device=device.device, to_host=True)
        world.things[arguments["to"]] = started
        if out is None:
            return
        started.out = out
        out.busy[started.end] = arguments["stager"]
        out.written_by.append(started.end)
        for leaf, content in zip(out.leaves, contents, strict=True):
            leaf.content = content

    def _prepare(self, world: World, out: Host, device: Device) -> None:
        if not out.writable or out.form != device.form or len(out.leaves) != len(device.arrays):
            raise Skip("it cannot be written")
        for index, leaf in enumerate(out.leaves):
            want = device.content(index).array()
            if leaf.array.shape != want.shape or leaf.array.dtype != want.dtype or not leaf.array.flags.c_contiguous:
                raise Skip("it has other arrays")
        world.quiet(out)


@final
class GetUnderHold(Kind):
    """Get small arrays into pageable ones while copies are held, and have pinned memory made meanwhile: none that is in use."""

    name = "get_under_hold"
    weight = 1.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        if len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        source = sketch.pick("device", lambda seen: seen["device"] == 0 and _are_small(seen["groups"]))
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if source is None or stager is None:
            return []
        seen = sketch.seen(source)
        out = Make().made(sketch, stager, [[*group[:3], "C", "pageable"] for group in seen["groups"]], seen["form"])
        hold = HoldCopies().of(sketch, stager, "d2h")
        get = Get().of(sketch, stager, source, out.arguments["to"])
        sizes = [sketch.random.choice(SIZES) for _ in range(4)]
        makes = [Make().made(sketch, stager, [[1, "uint8", [size], "C", "pinned"]], "leaf") for size in sizes]
        # What the stager has kept for gets goes back to the pool.
        trim = [Step("trim", {"stager": stager})] if sketch.chance(0.7) else []
        release = Release().of(sketch, hold.arguments["to"])
        return [out, hold, get, *trim, *makes, release, *(CheckHost().of(make.arguments["to"]) for make in (out, *makes))]

    def run(self, world: World, **arguments: Any) -> None:
        raise AssertionError("it is drawn as steps of other kinds")


def _are_small(groups: list[Any]) -> bool:
    count = sum([group[0] for group in groups])
    return bool(count <= 16 and sum([group[0] * math.prod(group[2]) for group in groups]) <= 8 << 10)


ALL: tuple[type[Kind], ...] = (Get, GetUnderHold)
