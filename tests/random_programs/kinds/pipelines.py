"""Whole loops in one step: prefetch, drain and stream_map over small sources, to the end or broken off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, final

import numpy as np

import xferlib
from tests.random_programs.content import Content, assert_holds, fill
from tests.random_programs.kinds.hosts import drawn_form, make_host
from tests.random_programs.kinds.kind import Kind, refusable
from tests.random_programs.kinds.rings import Slots, write_slot
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import CURRENT, HOST, Device, Host, Skip, World

__all__ = ["ALL"]


@final
class Batches:
    """A source. `way`: new arrays each time, the same ones rewritten, or a ring's slots."""

    def __init__(self, world: World, arguments: dict[str, Any]) -> None:
        self.contents: list[list[Content]] = []
        self._world = world
        self._arguments = arguments
        self._opened = world.stager(arguments["stager"])

    def __iter__(self) -> Iterator[Any]:
        ways = {"slots": self._slots, "rewritten": self._rewritten}
        batches = ways.get(self._arguments["way"], self._fresh)()
        box: list[Any] = []
        while True:
            # Without a name: nothing may refer to a fresh batch.
            box.extend(itertools.islice(batches, 1))
            if not box:
                return
            self._world.run_ahead(len(self.contents[-1]))
            yield box.pop()

    def _made(self, number: int) -> Host:
        arguments = self._arguments
        return make_host(self._world, self._opened, f"{arguments['owner']}.{number}", arguments["groups"], arguments["form"])

    def _fresh(self) -> Iterator[Any]:
        for number in range(self._arguments["count"]):
            host = self._made(number)
            self.contents.append([leaf.content for leaf in host.leaves])
            box = [host.tree]
            del host
            yield box.pop()

    def _rewritten(self) -> Iterator[Any]:
        host = self._made(0)
        for _ in range(self._arguments["count"]):
            for leaf in host.leaves:
                leaf.content = leaf.content.next()
                fill(leaf.array, leaf.content)
            self.contents.append([leaf.content for leaf in host.leaves])
            yield host.tree

    def _slots(self) -> Iterator[Any]:
        slots = self._world.find(self._arguments["ring"], Slots)
        for number in range(self._arguments["count"]):
            slot = slots.ring.acquire()
            self.contents.append([leaf.content for leaf in write_slot(slot, slots.groups, f"{self._arguments['owner']}.{number}")])
            yield slot


def drawn_source(sketch: Sketch) -> dict[str, Any] | None:
    """Draw a source of batches and the stager that puts them."""
    ring = sketch.pick("ring") if sketch.chance(0.4) else None
    stager = sketch.pick("stager")
    if ring is not None:
        seen = sketch.seen(ring)
        stager, groups, form, way = seen["stager"], seen["groups"], "dict", "slots"
        if stager not in sketch.names("stager"):
            return None
    else:
        groups = sketch.palette.groups(memory=sketch.random.choice((None, "pinned", "pageable")), plain=True)
        groups = [
            [count, dtype, shape, layout, "pageable" if kind in ("readonly", "memmap") else kind]
            for count, dtype, shape, layout, kind in groups
        ]
        form, way = drawn_form(sketch, groups), sketch.random.choice(("fresh", "fresh lent", "rewritten"))
    if stager is None:
        return None
    count, owner = sketch.random.randint(0, 6), sketch.name("b")
    return {"stager": stager, "way": way, "ring": ring, "groups": groups, "form": form, "count": count, "owner": owner}


def checked_source(world: World, arguments: dict[str, Any]) -> Batches:
    if arguments["way"] == "slots":
        slots = world.find(arguments["ring"], Slots)
        if slots.closed or slots.stager.closed or slots.out:
            raise Skip("some slots are out")
    return Batches(world, arguments)


@final
class Prefetch(Kind):
    name = "prefetch"
    weight = 1.2

    def draw(self, sketch: Sketch) -> list[Step]:
        source = drawn_source(sketch)
        if source is None:
            return []
        keep = None
        if source["count"]:
            seen = {key: source[key] for key in ("groups", "form", "stager")}
            seen["device"] = sketch.seen(source["stager"])["device"]
            keep = sketch.add(sketch.name("d"), "device", **seen, views=(), foreign=False)
        take = sketch.random.choice((source["count"], source["count"], 1))
        return [self.step(to=keep, **source, depth=sketch.random.randint(1, 3), take=take)]

    def run(self, world: World, **arguments: Any) -> None:
        opened = world.stager(arguments["stager"])
        batches = checked_source(world, arguments)
        rewrites = False if arguments["way"] == "fresh lent" else None
        taken = 0
        with refusable(opened), xferlib.prefetch(batches, opened.stager, arguments["depth"], rewrites=rewrites) as loop:
            for value in loop:
                contents = batches.contents[taken]
                taken += 1
                arrays = world.check_result(arguments["form"], value, contents, "what prefetch gave")
                for array, content in zip(arrays, contents, strict=True):
                    assert_holds(world.kit.read(array), content, f"batch {taken - 1} of a prefetch")
                self._keep(world, arguments, arrays, contents)
                if taken == arguments["take"]:
                    return
        assert taken == arguments["count"], f"prefetch gave {taken} of {arguments['count']} batches"

    def _keep(self, world: World, arguments: dict[str, Any], arrays: list[Any], contents: list[Content]) -> None:
        if arguments.get("to") is None:
            return
        device = world.stager(arguments["stager"]).device
        kept = Device(arrays, [[content] for content in contents], form=arguments["form"], device=device)
        kept.order = {CURRENT, HOST}
        world.things[arguments["to"]] = kept


@final
class StreamMap(Kind):
    """Batches to the device and back."""

    name = "stream_map"
    weight = 1.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = drawn_source(sketch)
        if source is None:
            return []
        depth, take = sketch.random.randint(1, 3), sketch.random.choice((source["count"], source["count"], 1))
        return [self.step(**source, depth=depth, take=take)]

    def run(self, world: World, **arguments: Any) -> None:
        opened = world.stager(arguments["stager"])
        batches = checked_source(world, arguments)
        rewrites = False if arguments["way"] == "fresh lent" else None
        taken = 0
        with refusable(opened):
            loop = xferlib.stream_map(lambda batch: batch, batches, opened.stager, arguments["depth"], rewrites=rewrites)
            with loop:
                for value in loop:
                    contents = batches.contents[taken]
                    taken += 1
                    arrays = world.check_result(arguments["form"], value, contents, "what stream_map gave")
                    for array, content in zip(arrays, contents, strict=True):
                        assert_holds(array, content, f"result {taken - 1} of a stream_map")
                    if taken == arguments["take"]:
                        return
        assert taken == arguments["count"], f"stream_map gave {taken} of {arguments['count']} results"


@final
class Drain(Kind):
    """Device arrays to the host, into new memory or into the rows of one array."""

    name = "drain"
    weight = 1.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("device", lambda seen: seen["form"] == "leaf" and len(seen["groups"][0][2]) > 0)
        if source is None:
            return []
        seen = sketch.seen(source)
        stager = sketch.pick("stager", lambda other: other["device"] == seen["device"])
        if stager is None:
            return []
        count = sketch.random.randint(1, 4)
        return [self.step(stager=stager, source=source, count=count, depth=sketch.random.randint(1, 3), rows=sketch.chance(0.5))]

    def run(self, world: World, **arguments: Any) -> None:
        opened, device = world.stager(arguments["stager"]), world.find(arguments["source"], Device)
        if device.form != "leaf" or device.device != opened.device or not device.content(0).array().ndim:
            raise Skip("it is drained by no ring")
        world.may_use(device, None)
        content, count = device.content(0), arguments["count"]
        values = content.array()
        if not values.nbytes:
            raise Skip("it has no bytes")
        out = np.zeros((count * len(values), *values.shape[1:]), values.dtype) if arguments["rows"] else None
        taken = 0
        with refusable(opened), xferlib.drain([device.arrays[0]] * count, opened.stager, arguments["depth"], out=out) as results:
            for result in results:
                assert_holds(result, content, f"result {taken} of a drain")
                taken += 1
        assert taken == count, f"drain gave {taken} of {count} results"
        if out is not None:
            for row in range(count):
                assert_holds(out[row * len(values) : (row + 1) * len(values)], content, f"rows {row} of a drain's out")


ALL: tuple[type[Kind], ...] = (Prefetch, StreamMap, Drain)
