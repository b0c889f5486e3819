"""Rings of slots, of one stager, whose slots other stagers read and write as well."""

from __future__ import annotations

from typing import Any, final

import xferlib
from tests.random_programs.content import Content, assert_holds, fill
from tests.random_programs.kinds.holds import HoldCompute, HoldCopies
from tests.random_programs.kinds.kind import Kind, refusable
from tests.random_programs.kinds.locks import Map, mapped
from tests.random_programs.kinds.puts import Put
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.trees import flat
from tests.random_programs.world import Host, Leaf, Opened, Skip, Started, World

__all__ = ["ALL", "Slots"]


@final
class Slots:
    """A ring. `out`: slots that are with the program; there must never be a wait for one that does not come back."""

    def __init__(self, ring: xferlib.Ring, stager: Opened, groups: list[Any], slots: int) -> None:
        self.ring = ring
        self.stager = stager
        self.groups = groups
        self.slots = slots
        self.out: set[str] = set()
        self.closed = False


def write_slot(slot: Any, groups: list[Any], owner: str) -> list[Leaf]:
    """Write a slot's batch, and return its leaves."""
    leaves: list[Leaf] = []
    for index, array in enumerate(flat("dict", slot.tree)):
        _, dtype, shape, *_ = groups[index]
        content = Content(f"{owner}.{index}", 0, dtype, tuple(shape))
        fill(array, content)
        leaves.append(Leaf(array, content, "pinned"))
    return leaves


@final
class OpenRing(Kind):
    name = "open_ring"
    weight = 1.5
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        if stager is None or len(sketch.names("ring")) >= 2:
            return []
        groups = [sketch.palette.group(memory="pinned", plain=True, most=1 << 20) for _ in range(sketch.random.randint(1, 3))]
        slots = sketch.random.randint(1, 3)
        known = {"groups": groups, "slots": slots, "stager": stager, "device": sketch.seen(stager)["device"]}
        return [self.step(to=sketch.add(sketch.name("r"), "ring", **known), stager=stager, groups=groups, slots=slots)]

    def run(self, world: World, **arguments: Any) -> None:
        opened, groups = world.stager(arguments["stager"]), arguments["groups"]
        spec = {f"k{index:04}": (tuple(shape), dtype) for index, (_, dtype, shape, *_) in enumerate(groups)}
        from tests.random_programs.content import dtype_named

        typed = {key: (shape, dtype_named(dtype)) for key, (shape, dtype) in spec.items()}
        with refusable(opened):
            ring = xferlib.Ring(opened.stager, typed, slots=arguments["slots"])
        world.things[arguments["to"]] = Slots(ring, opened, groups, arguments["slots"])


@final
class Acquire(Kind):
    name = "acquire"
    weight = 4.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        ring = sketch.pick("ring")
        return [] if ring is None else [self.of(sketch, ring)]

    def of(self, sketch: Sketch, ring: str) -> Step:
        """Return the step that acquires a slot of this ring."""
        seen = sketch.seen(ring)
        known = {"groups": seen["groups"], "form": "dict", "stager": seen["stager"], "slot": ring}
        return self.step(to=sketch.add(sketch.name("h"), "host", **known), ring=ring)

    def run(self, world: World, **arguments: Any) -> None:
        slots, name = world.find(arguments["ring"], Slots), arguments["to"]
        if slots.closed or slots.stager.closed or len(slots.out) >= slots.slots:
            raise Skip("every slot is out")
        slot = slots.ring.acquire()
        slots.out.add(name)
        leaves = write_slot(slot, slots.groups, name)
        world.things[name] = Host(leaves, slot.tree, form="dict", slot=(slots, slot))


@final
class PutSlot(Kind):
    """Put a slot, which may be in use by other transfers; its memory is the next batch's when nothing uses it."""

    name = "put_slot"
    weight = 5.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("host", lambda seen: seen["slot"] is not None, own=True)
        if source is None:
            return []
        seen = sketch.seen(source)
        sketch.gone(source)
        if sketch.chance(0.3):
            return [self.step(source=source, release=True)]
        device = sketch.seen(seen["slot"])["device"] if seen["slot"] in sketch.names("ring") else 0
        known = {"groups": seen["groups"], "form": "dict", "device": device, "stager": seen["stager"]}
        name = sketch.add(sketch.name("t"), "transfer", **known, to_host=False, into=None)
        return [self.step(to=name, source=source, stream=sketch.stream(device))]

    def run(self, world: World, **arguments: Any) -> None:
        name = arguments["source"]
        host = world.find(name, Host, own=True)
        if host.slot is None:
            raise Skip("it is no slot")
        slots, slot = host.slot
        if arguments.get("release") or slots.closed or slots.stager.closed:
            self._gone_back(world, name, host, slots)
            host.leaves.clear()
            host.tree = None
            slot.release()
            return
        world.settled(host)
        contents = [leaf.content for leaf in host.leaves]
        world.run_ahead(len(contents))
        with refusable(slots.stager):
            transfer = slot.put(stream=world.stream(arguments.get("stream")))
        self._gone_back(world, name, host, slots)
        started = Started(transfer, contents, form="dict", device=slots.stager.device, to_host=False)
        if arguments.get("to") is not None:
            world.things[arguments["to"]] = started

    def _gone_back(self, world: World, name: str, host: Host, slots: Slots) -> None:
        """Note that a slot is its ring's: whoever acquires it next writes it, over what gets of the program's wrote there."""
        del world.things[name]
        slots.out.discard(name)
        for started in world.all(Started):
            if started.out is host:
                started.out_is_ours = False


@final
class ShareSlot(Kind):
    """Let another stager or held work on a view read a slot that goes back to its ring meanwhile, and fill the slots again."""

    name = "share_slot"
    weight = 0.7
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        ring = sketch.pick("ring", lambda seen: seen["device"] == 0)
        if ring is None or len(sketch.names("hold")) >= sketch.traits.holds:
            return []
        seen = sketch.seen(ring)
        stagers = sketch.names("stager", lambda stager: stager["device"] == 0)
        if seen["stager"] not in stagers:
            return []
        other = sketch.random.choice([stager for stager in stagers if stager != seen["stager"]] or stagers)
        acquire = Acquire()
        first = acquire.of(sketch, ring)
        slot = first.arguments["to"]
        if sketch.traits.mapped and sketch.chance(0.5):
            hold = HoldCompute().of(sketch, other)
            leaves = sum(group[0] for group in seen["groups"])
            index = sketch.random.randrange(leaves)
            use = Map().step(stager=seen["stager"], source=slot, index=index, hold=hold.arguments["to"], write=False)
        else:
            hold = HoldCopies().of(sketch, other, "h2d")
            use = Put().of(sketch, other, slot)
        sketch.gone(slot)
        back = PutSlot().step(source=slot, release=True)
        return [first, hold, use, back, *(acquire.of(sketch, ring) for _ in range(seen["slots"]))]

    def run(self, world: World, **arguments: Any) -> None:
        raise AssertionError("it is drawn as steps of other kinds")


@final
class KeepView(Kind):
    """Keep a view of a slot that goes back to its ring, and use the ring: whoever has the view must go on seeing what it saw."""

    name = "keep_view"
    weight = 0.7
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        if not sketch.traits.mapped:
            return []
        ring = sketch.pick("ring", lambda seen: seen["device"] == 0 and seen["slots"] > 1)
        if ring is None:
            return []
        leaves = sum(group[0] for group in sketch.seen(ring)["groups"])
        return [self.step(ring=ring, index=sketch.random.randrange(leaves), owner=sketch.name("o"))]

    def run(self, world: World, **arguments: Any) -> None:
        slots, owner = world.find(arguments["ring"], Slots), arguments["owner"]
        if slots.closed or slots.stager.closed or len(slots.out) + 1 >= slots.slots:
            raise Skip("too few slots are free")
        slot = slots.ring.acquire()
        try:
            leaf = write_slot(slot, slots.groups, owner)[arguments["index"]]
            if not leaf.array.nbytes:
                raise Skip("it cannot be mapped")
            view = mapped(slots.stager.stager, leaf.array)
        finally:
            slot.release()
        # One more than are free, so that the ring comes round.
        for turn in range(slots.slots):
            other = slots.ring.acquire()
            write_slot(other, slots.groups, f"{owner}.{turn}")
            other.release()
        assert_holds(world.kit.read(view), leaf.content, "what a view showed whose slot went back")


@final
class CloseRing(Kind):
    name = "close_ring"
    weight = 0.5
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        ring = sketch.pick("ring", own=True)
        if ring is None:
            return []
        sketch.gone(ring)
        return [self.step(ring=ring)]

    def run(self, world: World, **arguments: Any) -> None:
        slots = world.find(arguments["ring"], Slots, own=True)
        slots.closed = True
        slots.ring.close()


@final
class Turn(Kind):
    """Acquire, write and put a slot, and look at what came: what every thread of a program may do with one ring."""

    name = "turn"
    weight = 1.5

    def draw(self, sketch: Sketch) -> list[Step]:
        ring = sketch.pick("ring")
        return [] if ring is None else [self.step(ring=ring, turns=sketch.random.randint(1, 4), owner=sketch.name("o"))]

    def run(self, world: World, **arguments: Any) -> None:
        slots = world.find(arguments["ring"], Slots)
        if slots.closed or slots.stager.closed or len(slots.out) >= slots.slots:
            raise Skip("every slot is out")
        for turn in range(arguments["turns"]):
            owner = f"{arguments['owner']}.{turn}"
            slot = slots.ring.acquire()
            contents = [leaf.content for leaf in write_slot(slot, slots.groups, owner)]
            try:
                transfer = slot.put()
            except xferlib.AllocationError:
                if not slots.stager.tight:
                    raise
                slot.release()
                return
            arrays = flat("dict", transfer.result())
            for array, content in zip(arrays, contents, strict=True):
                assert_holds(world.kit.read(array), content, "what a slot's put gave")


ALL: tuple[type[Kind], ...] = (OpenRing, Acquire, PutSlot, ShareSlot, KeepView, CloseRing, Turn)
