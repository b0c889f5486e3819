"""Transfers to the device, and what their arrays are asked for."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, final

from tests.random_programs.content import Wrong
from tests.random_programs.kinds.hosts import Make
from tests.random_programs.kinds.kind import Kind, as_current, refusable
from tests.random_programs.program import Step
from tests.random_programs.sketch import Seen, Sketch
from tests.random_programs.trees import built
from tests.random_programs.world import CURRENT, HOST, Device, Host, Leaf, Skip, Started, World

__all__ = ["ALL", "adopt", "put_alike"]

SHORT_SECONDS = 0.0005
"""Less than what is held stays so while a step waits."""


@final
class Put(Kind):
    name = "put"
    weight = 10.0

    def draw(self, sketch: Sketch) -> list[Step]:
        stager, source = sketch.pick("stager"), sketch.pick("host")
        return [] if stager is None or source is None else [self.of(sketch, stager, source)]

    def of(self, sketch: Sketch, stager: str, source: str) -> Step:
        """Return the step that puts this."""
        seen, device = sketch.seen(source), sketch.seen(stager)["device"]
        known = {"groups": seen["groups"], "form": seen["form"], "device": device, "stager": stager}
        name = sketch.add(sketch.name("t"), "transfer", **known, to_host=False, into=None)
        borrow = sketch.chance(0.25) or None
        stream = sketch.stream(device)
        return self.step(to=name, stager=stager, source=source, stream=stream, borrow=borrow, careless=sketch.chance(0.1))

    def run(self, world: World, **arguments: Any) -> None:
        opened, host = world.stager(arguments["stager"]), world.find(arguments["source"], Host)
        stream, borrow = arguments.get("stream"), bool(arguments.get("borrow"))
        world.settled(host)
        world.run_ahead(len(host.leaves))
        with refusable(opened):
            transfer = opened.stager.put(host.tree, stream=world.stream(stream), borrow=borrow)
        contents = [leaf.content for leaf in host.leaves]
        started = Started(transfer, contents, form=host.form, device=opened.device, to_host=False)
        if stream is not None:
            started.asked.add(stream)
        world.things[arguments["to"]] = started
        reads(host, transfer, arguments["stager"], borrow=borrow, careless=bool(arguments.get("careless")))


@final
class DropBorrowed(Kind):
    """Drop a borrowed put whose copies are being started, and put the next: its memory must not be the first one's yet."""

    name = "drop_borrowed"
    weight = 1.0

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        if stager is None:
            return []
        # Large enough to be lent, and so that the second put comes before the last copy of the first.
        shape = [sketch.random.choice((1 << 20, 2 << 20, 4 << 20))]
        makes = [Make().made(sketch, stager, [[1, "uint8", shape, "C", memory]], "leaf") for memory in ("pageable", "pinned")]
        first, second = [Put().of(sketch, stager, make.arguments["to"]) for make in makes]
        for name, value in (("borrow", True), ("stream", None), ("careless", False)):
            first.arguments[name] = value
        dropped = first.arguments["to"]
        sketch.gone(dropped)
        return [*makes, first, Step("drop", {"names": [dropped]}), second]

    def run(self, world: World, **arguments: Any) -> None:
        raise AssertionError("it is drawn as steps of other kinds")


def put_alike(sketch: Sketch, seen: Seen) -> list[Step]:
    """Return steps that put other arrays like these by the stager that put them: where memory is used too soon, they lie there."""
    stager = seen.get("stager")
    if stager not in sketch.names("stager"):
        return []
    memory = sketch.random.choice(("pinned", "pageable"))
    groups = [[count, dtype, shape, "C", memory] for count, dtype, shape, *_ in seen["groups"]]
    make = Make().made(sketch, stager, groups, seen["form"])
    return [make, Put().of(sketch, stager, make.arguments["to"])]


def reads(host: Host, transfer: Any, by: str, *, borrow: bool, careless: bool = False) -> None:
    """Note that a transfer reads host arrays after it was started. `careless`: nobody will know for how long."""
    if not borrow and not any(leaf.locked for leaf in host.leaves):
        # Pageable memory is the caller's again as soon as put returns.
        return
    pinned = all(leaf.memory in ("pinned", "view") for leaf in host.leaves)
    if careless and pinned and host.slot is None:
        host.lost = True
    else:
        host.busy[transfer.completion] = by


@final
class PutInto(Kind):
    """Overwrite device arrays, of whatever stager, while gets of whatever stager may still read them."""

    name = "put_into"
    weight = 4.0

    def draw(self, sketch: Sketch) -> list[Step]:
        if not sketch.traits.put_into:
            return []
        target = sketch.pick("device", lambda seen: not seen["views"], own=True)
        if target is None:
            return []
        seen = sketch.seen(target)
        stager = sketch.pick("stager", lambda other: other["device"] == seen["device"])
        if stager is None:
            return []
        memory = sketch.random.choice(("pinned", "pinned", "pageable"))
        groups = [[count, dtype, shape, "C", memory] for count, dtype, shape, *_ in seen["groups"]]
        make = Make().made(sketch, stager, groups, seen["form"])
        source = make.arguments["to"]
        known = {"groups": groups, "form": seen["form"], "device": seen["device"], "stager": stager}
        name = sketch.add(sketch.name("t"), "transfer", **known, to_host=False, into=target)
        return [make, self.step(to=name, stager=stager, source=source, target=target, stream=sketch.stream(seen["device"]))]

    def run(self, world: World, **arguments: Any) -> None:
        opened, host = world.stager(arguments["stager"]), world.find(arguments["source"], Host)
        target = world.find(arguments["target"], Device, own=True)
        if not target.plain or target.device != opened.device or len(target.arrays) != len(host.leaves):
            raise Skip("it cannot be overwritten")
        stream = arguments.get("stream")
        world.settled(host)
        world.may_use(target, stream)
        # The program must not overwrite what its own work on other streams has yet to read, under whatever name it was given to
        # that work, also one that is gone.
        cells = {id(cell) for cell in target.cells}
        for reader in list(world.readers):
            if reader.hold != stream and id(reader.cell) in cells:
                reader.check()
        tree = built(target.form, target.arrays)
        with refusable(opened):
            transfer = opened.stager.put(
                built(target.form, [leaf.array for leaf in host.leaves]), into=tree, stream=world.stream(stream)
            )
        contents = [leaf.content for leaf in host.leaves]
        started = Started(transfer, contents, form=target.form, device=opened.device, to_host=False)
        started.cells, started.into = target.cells, target
        world.things[arguments["to"]] = started
        for cell, content in zip(target.cells, contents, strict=True):
            cell[0] = content
        for earlier in world.all(Started):
            # Also where the target is a part of what that one gave.
            if any(id(cell) in cells for cell in earlier.cells):
                earlier.over = started
        for device in world.all(Device):
            if device.shares(target.cells):
                device.order, device.started = set() if stream is None else {stream}, started
        reads(host, transfer, arguments["stager"], borrow=False)


@final
class Value(Kind):
    """Take the arrays of a transfer: on the current stream, on a named one, or when it is done."""

    name = "value"
    weight = 10.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("transfer", lambda seen: not seen.get("taken"), own=True) or sketch.pick("transfer", own=True)
        if source is None:
            return []
        seen = sketch.seen(source)
        how = sketch.random.choice(("value", "value", "result", "timeout"))
        stream = None if seen["to_host"] else sketch.stream(seen["device"])
        current = None if stream or seen["to_host"] else sketch.current(seen["device"])
        if stream is not None:
            how = sketch.random.choice(("value_on", "stream_wait"))
        seen["taken"] = True
        step = self.step(to=None, source=source, how=how, stream=stream, current=current, keep=sketch.chance(0.6))
        self._note(sketch, step, seen)
        return [step]

    def _note(self, sketch: Sketch, step: Step, seen: Seen) -> None:
        if seen["into"] is not None:
            return
        known = {"groups": seen["groups"], "form": seen["form"]}
        if seen["to_host"]:
            groups = [[count, dtype, shape, "C", "pinned"] for count, dtype, shape, *_ in seen["groups"]]
            known["groups"] = groups
            step.arguments["to"] = sketch.add(sketch.name("h"), "host", **known, stager=seen["stager"], slot=None)
        else:
            known |= {"device": seen["device"], "stager": seen["stager"]}
            step.arguments["to"] = seen["given"] = sketch.add(sketch.name("d"), "device", **known, views=(), foreign=False)

    def run(self, world: World, **arguments: Any) -> None:
        started = world.find(arguments["source"], Started, own=True)
        if started.to_host:
            self._take_result(world, started, arguments["to"], arguments["how"])
            return
        with as_current(world, arguments.get("current")):
            value, order = self._take(world, started, arguments)
        if started.into is not None:
            world.check_result(started.form, value, started.contents, "what put(into=) gave")
            if started.over is None:
                for device in world.all(Device):
                    if device.started is started:
                        device.order |= order
            return
        leaves = world.check_result(started.form, value, started.contents, "what put gave")
        device = adopt(world, arguments["to"], leaves, started)
        if started.over is not None:
            # What it has given is being written since, and is used behind that.
            device.started = started.over
            return
        device.order |= order
        device.started = started if arguments.get("keep") else None

    def _take(self, world: World, started: Started, arguments: dict[str, Any]) -> tuple[Any, set[str]]:
        transfer, stream = started.transfer, str(arguments.get("stream"))
        match arguments["how"]:
            case "value_on":
                return transfer.value_on(world.stream(stream)), {stream}
            case "stream_wait":
                transfer.stream_wait(world.stream(stream))
                return transfer.value_on(world.stream(stream)), {stream}
            case "result":
                value = transfer.result()
            case "timeout":
                value = in_time(transfer)
            case _:
                value = transfer.value
                current = arguments.get("current")
                on_host = current is None and world.kit.flags.streams and not world.kit.on_gpu
                return value, {HOST if on_host else current or CURRENT}
        return value, {HOST}

    def _take_result(self, world: World, started: Started, to: str | None, how: str) -> None:
        transfer = started.transfer
        value = transfer.result() if how == "result" else in_time(transfer) if how == "timeout" else transfer.value
        leaves = world.check_result(started.form, value, started.contents, "what get gave")
        if started.out is not None:
            if not started.out_is_ours:
                # Its arrays are the ring's, and so is what is in them.
                return
            for leaf, array in zip(started.out.leaves, leaves, strict=True):
                if array is not leaf.array:
                    raise Wrong("get(out=) did not give the arrays that it was given")
            return
        if started.taken:
            # The arrays that it gave before, which the program may have written since.
            return
        made = [Leaf(array, content, "pinned") for array, content in zip(leaves, started.contents, strict=True)]
        host = Host(made, value, form=started.form)
        started.taken = True
        world.check_host(host, "what get gave")
        if to is not None:
            world.things[to] = host


def in_time(transfer: Any) -> Any:
    """Wait for a transfer with a timeout that may be too short, and then with a long one."""
    with suppress(TimeoutError):
        return transfer.result(SHORT_SECONDS)
    return transfer.result(60)


def adopt(world: World, name: str | None, leaves: list[Any], started: Started) -> Device:
    """Note device arrays that a transfer gave."""
    device = Device(leaves, started.cells, form=started.form, device=started.device)
    if name is not None:
        world.things[name] = device
    return device


@final
class Done(Kind):
    """Ask whether a transfer is done. If so, its data is there."""

    name = "done"
    weight = 4.0

    def draw(self, sketch: Sketch) -> list[Step]:
        source = sketch.pick("transfer", own=True)
        return [] if source is None else [self.step(source=source)]

    def run(self, world: World, **arguments: Any) -> None:
        started = world.find(arguments["source"], Started, own=True)
        if not started.transfer.done():
            return
        if started.out is not None and started.out_is_ours and started.out.written_by == [started.end]:
            # No later get writes the same bytes there since.
            started.out.written_by.clear()
            world.check_host(started.out, "done() said yes, and what get wrote")
        for device in world.all(Device):
            if device.started is started:
                device.order.add(HOST)
                world.check_device(device, "done() said yes, and what put wrote")


@final
class CheckDevice(Kind):
    name = "check_device"
    weight = 3.0

    def draw(self, sketch: Sketch) -> list[Step]:
        device = sketch.pick("device", own=True)
        return [] if device is None else [self.step(device=device)]

    def run(self, world: World, **arguments: Any) -> None:
        world.check_device(world.find(arguments["device"], Device, own=True), arguments["device"])


ALL: tuple[type[Kind], ...] = (Put, PutInto, DropBorrowed, Value, Done, CheckDevice)
