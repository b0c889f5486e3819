"""Dropping things in any order, keeping some of them, cycles of garbage, and when the collector runs."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any, final

import numpy as np

import xferlib
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.kinds.puts import put_alike
from tests.random_programs.program import Step
from tests.random_programs.sketch import Seen, Sketch
from tests.random_programs.world import HOST, Device, Host, Named, Skip, Started, World

__all__ = ["ALL"]

FINALIZERS = ("none", "none", "none", "note", "done", "put", "back", "back")


def take(world: World, name: str) -> Device | Host | Started:
    """Take a thing out of the world. Raises `Skip` for what must be ended instead."""
    thing = world.find(name, object, own=True)
    if not isinstance(thing, Device | Host | Started):
        raise Skip(f"{name} is not dropped")
    if isinstance(thing, Host) and thing.slot is not None:
        raise Skip("it is put or given back")
    del world.things[name]
    return thing


def forget(world: World, name: str) -> Any:
    """Take a thing out of the world, and return what users hold of it. Raises `Skip` as `take` does."""
    thing = take(world, name)
    if isinstance(thing, Device):
        return list(thing.arrays)
    if isinstance(thing, Started):
        return thing.transfer
    return [thing.tree, [leaf.array for leaf in thing.leaves]]


@final
class Drop(Kind):
    name = "drop"
    weight = 9.0

    def draw(self, sketch: Sketch) -> list[Step]:
        kinds = sketch.random.choice(
            (("device",), ("transfer",), ("host",), ("transfer", "device"), ("device", "transfer", "host"))
        )
        names = [name for kind in kinds if (name := sketch.pick(kind, _free, own=True)) is not None]
        if not names:
            return []
        last = sketch.seen(names[0])
        for name in names:
            sketch.gone(name)
        return [self.step(names=names), *_again(sketch, last)]

    def run(self, world: World, **arguments: Any) -> None:
        for name in arguments["names"]:
            with suppress(Skip):
                forget(world, name)


def _again(sketch: Sketch, seen: Seen) -> list[Step]:
    """Draw steps that use memory again which what is gone had: mostly none."""
    return put_alike(sketch, seen) if sketch.chance(0.3) else []


def _free(seen: Seen) -> bool:
    return seen.get("slot") is None


class Knot:
    """Garbage that refers to itself, with whatever was in the frame."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held
        self.me = self


class NotingKnot(Knot):
    def __init__(self, held: list[Any], notes: list[str]) -> None:
        super().__init__(held)
        self.notes = notes

    def __del__(self) -> None:
        self.notes.append("finalized")


class AskingKnot(Knot):
    def __del__(self) -> None:
        for thing in self.held:
            if isinstance(thing, xferlib.Transfer):
                with suppress(xferlib.XferError):
                    thing.done()


class PuttingKnot(Knot):
    """Its finalizer transfers, which is served or refused in words."""

    def __init__(self, held: list[Any], stager: xferlib.Stager) -> None:
        super().__init__(held)
        self.stager = stager

    def __del__(self) -> None:
        with suppress(xferlib.XferError):
            self.stager.put(np.zeros(300, np.uint8))


class ReturningKnot(Knot):
    """Its finalizer brings all that it held back to life. Python runs it once, so each of them does it for one cycle."""

    def __init__(self, held: list[Any], back: list[Any]) -> None:
        super().__init__(held)
        self.back = back

    def __del__(self) -> None:
        self.back.extend(self.held)


def die_and_come_back(world: World, names: list[str]) -> None:
    """Let things die in a cycle whose finalizer brings them back. They are then what they were, and have the names that they had.

    The collector took them for garbage, and each of them that has a finalizer has been through it.
    """
    back: list[tuple[str, Any]] = []
    held: list[tuple[str, Any]] = []
    for name in names:
        with suppress(Skip):
            held.append((name, take(world, name)))
    count = len(held)
    ReturningKnot(held, back)
    del held
    while len(back) < count:
        # It does nothing where another thread collects, which may have begun before these were garbage.
        gc.collect()
    world.things.update(back)


@final
class Cycle(Kind):
    """Let things die in a reference cycle: arrays, transfers, host memory; the stager, too, where nothing else needs it."""

    name = "cycle"
    weight = 4.0

    def draw(self, sketch: Sketch) -> list[Step]:
        names = {sketch.pick(kind, _free, own=True) for kind in ("device", "transfer", "host", "device")}
        # In an order that is the same in every process.
        chosen = [name for name in sorted(filter(None, names)) if sketch.chance(0.7)]
        seen = [sketch.seen(name) for name in chosen]
        stager = None
        if not sketch.threaded and sketch.chance(0.08):
            stager = sketch.pick("stager", own=True)
        if stager is not None:
            sketch.gone(stager)
        if not chosen and stager is None:
            return []
        by = sketch.pick("stager")
        finalizer = sketch.random.choice(FINALIZERS) if by else "none"
        if finalizer == "back" and stager is not None:
            # Its finalizer has it closed, whoever brings it back.
            finalizer = "note"
        if finalizer == "back":
            # With the transfers that gave them, without which they would be garbage to nobody.
            givers = sketch.names("transfer", lambda other: other.get("given") in chosen, own=True)
            step = self.step(names=sorted({*chosen, *givers}), stager=None, finalizer=finalizer, by=by)
            return [step, *self._look_at_what_is_back(sketch, chosen)]
        step = self.step(names=chosen, stager=stager, finalizer=finalizer, by=by)
        for name in chosen:
            sketch.gone(name)
        if not seen or not sketch.chance(0.5):
            return [step]
        return [step, *Collect().draw(sketch), *put_alike(sketch, seen[0])]

    def _look_at_what_is_back(self, sketch: Sketch, names: list[str]) -> list[Step]:
        """Draw steps that put others like these, which must not lie in their memory, and look at these then: mostly some."""
        devices = [name for name in names if sketch.seen(name)["kind"] == "device"]
        if not devices or not sketch.chance(0.7):
            return []
        others = [step for name in devices for step in put_alike(sketch, sketch.seen(name))]
        # What was put is there before anybody looks.
        put = [step.arguments["to"] for step in others if step.kind == "put"]
        waits = [Step("value", {"to": None, "source": name, "how": "result"}) for name in put]
        return [*others, *waits, *(Step("check_device", {"device": name}) for name in devices)]

    def run(self, world: World, **arguments: Any) -> None:
        if arguments["finalizer"] == "back":
            die_and_come_back(world, arguments["names"])
            return
        held: list[Any] = []
        for name in arguments["names"]:
            with suppress(Skip):
                held.append(forget(world, name))
        if arguments.get("stager") is not None:
            self._take_stager(world, arguments["stager"], held)
        match arguments["finalizer"]:
            case "note":
                NotingKnot(held, world.finalized)
            case "done":
                AskingKnot(held)
            case "put" if (by := world.things.get(arguments["by"])) is not None and not by.closed:
                PuttingKnot(held, by.stager)
            case _:
                Knot(held)

    def _take_stager(self, world: World, name: str, held: list[Any]) -> None:
        opened = world.stager(name)
        if world.holds:
            # They are entered by way of its backend.
            raise Skip("something is held")
        # What it has locked is unlocked when it goes, and others may be reading it.
        for host in world.all(Host):
            if any(leaf.locked and leaf.memory not in ("pinned", "view") for leaf in host.leaves):
                world.quiet(host)
        del world.things[name]
        held.append(opened.stager)


@final
class Collect(Kind):
    name = "collect"
    weight = 2.0

    def draw(self, sketch: Sketch) -> list[Step]:
        return [self.step(generation=sketch.random.choice((0, 1, 2, 2)))]

    def run(self, world: World, **arguments: Any) -> None:
        gc.collect(arguments["generation"])


@final
class Keep(Kind):
    """Keep some arrays of a tree and drop the others."""

    name = "keep"
    weight = 2.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("device", lambda seen: sum(group[0] for group in seen["groups"]) > 1, own=True)
        if source is None:
            return []
        seen = sketch.seen(source)
        leaves = [group for group in seen["groups"] for _ in range(group[0])]
        indices = sorted(sketch.random.sample(range(len(leaves)), sketch.random.randint(1, min(len(leaves), 4))))
        groups = [[1, *leaves[index][1:]] for index in indices]
        sketch.gone(source)
        known = {key: value for key, value in seen.items() if key not in ("kind", "groups", "form")}
        name = sketch.add(sketch.name("d"), "device", groups=groups, form="list", **known)
        # Alone: the transfer, which holds them all, is gone, too.
        alone = sketch.chance(0.6)
        transfers = sketch.names("transfer", lambda other: other.get("given") == source, own=True) if alone else []
        for transfer in transfers:
            sketch.gone(transfer)
        steps = [self.step(to=name, source=source, indices=indices, alone=alone)]
        steps += [Step("drop", {"names": transfers})] if transfers else []
        return [*steps, *(put_alike(sketch, seen) if sketch.chance(0.5) else [])]

    def run(self, world: World, **arguments: Any) -> None:
        device = world.find(arguments["source"], Device, own=True)
        indices = [index for index in arguments["indices"] if index < len(device.arrays)]
        if not indices:
            raise Skip("there are fewer arrays")
        kept = _like(device, [device.arrays[index] for index in indices], [device.cells[index] for index in indices])
        if arguments["alone"]:
            world.on_host(kept)
            kept.started = None
        del world.things[arguments["source"]]
        world.things[arguments["to"]] = kept


def _like(device: Device, arrays: list[Any], cells: list[Any], views: tuple[str, ...] = ()) -> Device:
    made = Device(arrays, cells, form="list", device=device.device, views=(*device.views, *views))
    made.order, made.started, made.foreign = set(device.order), device.started, device.foreign
    made.plain = device.plain and not views
    return made


@final
class View(Kind):
    """Take a view of an array, and keep it or drop what it is a view of."""

    name = "view"
    weight = 2.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("device", lambda seen: not seen["views"] and not seen["foreign"], own=True)
        if source is None or not sketch.traits.views:
            return []
        seen = sketch.seen(source)
        leaves = [group for group in seen["groups"] for _ in range(group[0])]
        index, how = sketch.random.randrange(len(leaves)), sketch.random.choice(sketch.traits.views)
        _, dtype, shape, *_ = leaves[index]
        if (how != "same" and (not shape or not shape[0])) or (how == "turned" and len(shape) != 2):
            return []
        if how != "same" and not sketch.traits.has_empty_views and (0 in shape or (how == "tail" and shape[0] == 1)):
            return []
        new = (
            {"tail": [shape[0] - 1, *shape[1:]], "steps": [-(-shape[0] // 2), *shape[1:]], "turned": shape[::-1]}.get(how, shape)
            if shape
            else shape
        )
        known = {"groups": [[1, dtype, new, "C", "pinned"]], "form": "list", "device": seen["device"], "foreign": False}
        known["stager"] = seen.get("stager")
        name = sketch.add(sketch.name("d"), "device", **known, views=(how,))
        drop = sketch.chance(0.4)
        if drop:
            sketch.gone(source)
        return [self.step(to=name, source=source, index=index, how=how, drop=drop)]

    def run(self, world: World, **arguments: Any) -> None:
        device = world.find(arguments["source"], Device, own=True)
        index = arguments["index"]
        if index >= len(device.arrays):
            raise Skip("there are fewer arrays")
        array = world.kit.view(device.arrays[index], arguments["how"])
        seen = _like(device, [array], [device.cells[index]], (arguments["how"],))
        if arguments["drop"]:
            del world.things[arguments["source"]]
        world.things[arguments["to"]] = seen


@final
class MakeForeign(Kind):
    """Make device arrays of the framework's own, in every layout that it has."""

    name = "foreign"
    weight = 1.5

    def draw(self, sketch: Sketch) -> list[Step]:
        group = sketch.palette.group(plain=True)
        group[3] = sketch.random.choice(sketch.traits.layouts)
        views = () if group[3] == "C" else ("laid out",)
        known = {"groups": [group], "form": "leaf", "device": 0, "views": views, "foreign": True}
        return [self.step(to=sketch.add(sketch.name("d"), "device", **known), group=group)]

    def run(self, world: World, **arguments: Any) -> None:
        from tests.random_programs.content import Content

        _, dtype, shape, layout, _ = arguments["group"]
        content = Content(arguments["to"], 0, dtype, tuple(shape))
        array = world.kit.foreign(content.array().copy(), layout)
        device = Device([array], [[content]], form="leaf", device=0)
        device.order, device.foreign, device.plain = {HOST}, True, layout == "C"
        world.things[arguments["to"]] = device


@final
class NameStream(Kind):
    name = "name_stream"
    weight = 0.7
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        if not sketch.traits.streams or len(sketch.names("stream")) >= 2:
            return []
        return [self.step(to=sketch.add(sketch.name("z"), "stream"))]

    def run(self, world: World, **arguments: Any) -> None:
        world.things[arguments["to"]] = Named(world.kit.stream())


ALL: tuple[type[Kind], ...] = (Drop, Cycle, Collect, Keep, View, MakeForeign, NameStream)
