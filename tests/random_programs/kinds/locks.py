"""Memory of the caller's that is page-locked in place, and views of the device's of host memory."""

from __future__ import annotations

import time
from typing import Any, final

import xferlib
from tests.random_programs.content import Array, Wrong, assert_holds
from tests.random_programs.kinds.holds import HoldCopies
from tests.random_programs.kinds.hosts import Make
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.kinds.puts import Put
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import Host, Leaf, Reader, Skip, World

__all__ = ["ALL", "Locked", "mapped"]

LATE_SECONDS = 0.001
"""How late `done()` may say that a copy has been made: less than what is held stays so while a step waits."""


@final
class Locked:
    """A pin."""

    def __init__(self, pin: Any, host: Host, stager: str) -> None:
        self.pin = pin
        self.host = host
        self.stager = stager


def leaf_of(host: Host, index: int) -> Leaf:
    if index >= len(host.leaves):
        raise Skip("there are fewer arrays")
    return host.leaves[index]


@final
class Pin(Kind):
    name = "pin"
    weight = 2.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        source = sketch.pick("host", lambda seen: any(group[4] in ("pageable", "readonly") for group in seen["groups"]))
        if stager is None or source is None or not sketch.traits.register:
            return []
        leaves = [group for group in sketch.seen(source)["groups"] for _ in range(group[0])]
        index = sketch.random.choice([at for at, leaf in enumerate(leaves) if leaf[4] in ("pageable", "readonly")])
        if sketch.chance(0.7):
            return [self.of(sketch, stager, source, index, sketch.random.choice(("whole", "whole", "head", "tail")))]
        # Both ends, by one stager or by two, and something between them that no copy engine can use.
        other = sketch.pick("stager")
        assert other is not None
        steps = [self.of(sketch, stager, source, index, "head"), self.of(sketch, other, source, index, "tail")]
        putting = sketch.pick("stager")
        assert putting is not None
        return [*steps, Put().of(sketch, putting, source)]

    def of(self, sketch: Sketch, stager: str, source: str, index: int, part: str) -> Step:
        """Return the step that pins an array or a part of it."""
        return self.step(to=sketch.add(sketch.name("p"), "pin"), stager=stager, source=source, index=index, part=part)

    def run(self, world: World, **arguments: Any) -> None:
        opened, host = world.stager(arguments["stager"]), world.find(arguments["source"], Host)
        leaf = leaf_of(host, arguments["index"])
        array: Array = leaf.array
        if leaf.memory not in ("pageable", "readonly") or not array.nbytes or host.slot is not None:
            raise Skip("it is pinned already, or has no bytes")
        if world.kit.on_gpu and array.nbytes < 1 << 20:
            raise Skip("it may have a page with another")
        if arguments["part"] != "whole":
            if not array.ndim or len(array) < 3:
                raise Skip("it is too short for parts")
            array = array[: len(array) // 3] if arguments["part"] == "head" else array[-(len(array) // 3) :]
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise Skip("it is not contiguous")
        # Borrowed memory that is locked while threads copy from it is the caller's affair.
        world.quiet(host)
        try:
            pin = opened.stager.pin(array)
        except (ValueError, xferlib.AllocationError) as error:
            if leaf.locked or (opened.tight and isinstance(error, xferlib.AllocationError)):
                raise Skip(f"refused: {error}") from None
            raise
        leaf.locked = True
        world.things[arguments["to"]] = Locked(pin, host, arguments["stager"])


@final
class Unpin(Kind):
    name = "unpin"
    weight = 1.5
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        pin = sketch.pick("pin", own=True)
        return [] if pin is None else [self.of(sketch, pin)]

    def of(self, sketch: Sketch, pin: str) -> Step:
        """Return the step that undoes a pin."""
        sketch.gone(pin)
        return self.step(pin=pin)

    def run(self, world: World, **arguments: Any) -> None:
        locked = world.find(arguments["pin"], Locked, own=True)
        if locked.host.lost:
            raise Skip("nobody knows who may be reading it")
        # Transfers of its own stager are waited for by the pin.
        world.quiet_but_for(locked.host, locked.stager)
        del world.things[arguments["pin"]]
        locked.pin.close()
        until = time.monotonic() + LATE_SECONDS
        for end in [end for end, by in locked.host.busy.items() if by == locked.stager]:
            while not end.done():
                if time.monotonic() > until:
                    raise Wrong("a pin was undone while its stager copied what was pinned")


@final
class UnpinUnderCopy(Kind):
    """Undo a pin while a copy of what it pins is held."""

    name = "unpin_under_copy"
    weight = 1.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager", lambda seen: seen["device"] == 0)
        if stager is None or not sketch.traits.register or len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        make = Make().made(sketch, stager, [[1, "uint8", [sketch.random.choice((1 << 20, 3 << 20))], "C", "pageable"]], "leaf")
        source = make.arguments["to"]
        pin = Pin().of(sketch, stager, source, 0, "whole")
        hold = HoldCopies().of(sketch, stager, "h2d")
        return [make, pin, hold, Put().of(sketch, stager, source), Unpin().of(sketch, pin.arguments["to"])]

    def run(self, world: World, **arguments: Any) -> None:
        raise AssertionError("it is drawn as steps of other kinds")


def mapped(stager: xferlib.Stager, array: Array, stream: Any = None) -> Any:
    """Return the device's view of what was made as pinned memory. Raises `Skip` where the limit had no room for it."""
    try:
        return stager.mapped(array, stream=stream)
    except ValueError as error:
        # Any other refusal is a failure.
        if "not in pinned memory" not in str(error) or not stager.stats().pool_fallbacks:
            raise
        raise Skip("the limit had no room for pinned memory when it was made") from None


@final
class Map(Kind):
    """Look at pinned memory through the device's view of it, or let held work on the device read it."""

    name = "map"
    weight = 2.5
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        if not sketch.traits.mapped:
            return []
        source = sketch.pick("host", lambda seen: all(group[4] == "pinned" for group in seen["groups"]))
        if source is None:
            return []
        seen = sketch.seen(source)
        stager = seen["stager"]
        if stager not in sketch.names("stager", lambda other: other["device"] == 0):
            return []
        leaves = sum(group[0] for group in seen["groups"])
        hold = sketch.pick("hold", lambda other: other["compute"])
        index = sketch.random.randrange(leaves)
        return [self.step(stager=stager, source=source, index=index, hold=hold, write=hold is None and sketch.chance(0.4))]

    def run(self, world: World, **arguments: Any) -> None:
        opened, host = world.stager(arguments["stager"]), world.find(arguments["source"], Host)
        leaf, name = leaf_of(host, arguments["index"]), arguments.get("hold")
        hold = None if name is None else world.holds.get(name)
        if not leaf.array.nbytes or not leaf.array.flags.c_contiguous or host.lost or (name is not None and hold is None):
            raise Skip("it cannot be mapped")
        world.settled(host)
        view = mapped(opened.stager, leaf.array, None if hold is None else hold.stream)
        if hold is not None:
            reader = Reader(str(name), world.kit.read_later(view, hold.hold), leaf.content, None)
            host.busy[reader] = "the device"
            world.readers.append(reader)
            return
        assert_holds(world.kit.read(view), leaf.content, "what a mapped view showed")
        if arguments["write"]:
            world.quiet(host)
            leaf.content = leaf.content.next()
            world.kit.hooks.write(view, leaf.content.array().copy())
            world.check_host(host, "what a mapped view wrote")


ALL: tuple[type[Kind], ...] = (Pin, Unpin, UnpinUnderCopy, Map)
