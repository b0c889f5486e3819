"""Host arrays of every kind: made, rewritten, looked at."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from tests.random_programs.content import Array, Content, dtype_named, fill
from tests.random_programs.kinds.kind import Kind, refusable
from tests.random_programs.kits import laid_out
from tests.random_programs.program import Step
from tests.random_programs.sizes import Group
from tests.random_programs.sketch import Sketch
from tests.random_programs.trees import FORMS, built
from tests.random_programs.world import Host, Leaf, Opened, World

__all__ = ["ALL", "Make", "drawn_form", "make_host"]


def drawn_form(sketch: Sketch, groups: list[Group]) -> str:
    count = sum(group[0] for group in groups)
    if count == 1 and sketch.chance(0.7):
        return "leaf"
    return sketch.random.choice(FORMS[1:])


@final
class Make(Kind):
    """Make a tree of host arrays. The stager is the one whose pinned memory it is in."""

    name = "make"
    weight = 9.0

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        if stager is None:
            return []
        memory = sketch.random.choice((None, "pinned", "pinned", "pageable"))
        groups = sketch.palette.groups(memory=memory)
        return [self.made(sketch, stager, groups, drawn_form(sketch, groups))]

    def made(self, sketch: Sketch, stager: str, groups: list[Group], form: str) -> Step:
        """Return the step that makes these."""
        name = sketch.add(sketch.name("h"), "host", groups=groups, form=form, stager=stager, slot=None)
        return self.step(to=name, stager=stager, form=form, groups=groups)

    def run(self, world: World, **arguments: Any) -> None:
        opened = world.find(arguments["stager"], Opened)
        name = arguments["to"]
        with refusable(opened):
            world.things[name] = make_host(world, opened, name, arguments["groups"], arguments["form"])


def make_host(world: World, opened: Opened, name: str, groups: list[Group], form: str) -> Host:
    leaves: list[Leaf] = []
    for count, dtype, shape, layout, memory in groups:
        for _ in range(count):
            content = Content(f"{name}.{len(leaves)}", 0, dtype, tuple(shape))
            array = _array(world, opened, content, layout, memory)
            leaves.append(Leaf(array, content, memory))
    return Host(leaves, built(form, [leaf.array for leaf in leaves]), form=form)


def _array(world: World, opened: Opened, content: Content, layout: str, memory: str) -> Array:
    shape, dtype = content.shape, dtype_named(content.dtype)
    empty = dtype.itemsize == 0 or 0 in shape
    if memory in ("pinned", "view") and not opened.closed:
        array = _pinned(opened, shape, dtype, whole=memory == "pinned")
    elif memory == "memmap" and not empty:
        path = world.folder / content.owner
        array = np.memmap(path, dtype, "w+", shape=shape or (1,)).reshape(shape)
        path.unlink()
    else:
        array = laid_out(np.zeros(shape, dtype), layout)
        if layout == "offset" and shape and shape[0]:
            array = np.zeros((shape[0] + 1, *shape[1:]), dtype)[1:]
    fill(array, content)
    if memory == "readonly":
        array.flags.writeable = False
    return array


def _pinned(opened: Opened, shape: tuple[int, ...], dtype: np.dtype[Any], *, whole: bool) -> Array:
    if whole or not shape:
        return opened.stager.empty_pinned(shape, dtype)
    # In the middle of a larger one, and not where it begins.
    rows = opened.stager.empty_pinned((shape[0] + 3, *shape[1:]), dtype)
    return rows[2 : 2 + shape[0]]


@final
class Rewrite(Kind):
    """Write other values into host arrays: at once where they are pageable and were not borrowed, else when no copy uses them."""

    name = "rewrite"
    weight = 6.0

    def draw(self, sketch: Sketch) -> list[Step]:
        host = sketch.pick("host", own=True)
        return [] if host is None else [self.step(host=host)]

    def run(self, world: World, **arguments: Any) -> None:
        host = world.find(arguments["host"], Host, own=True)
        if not host.writable:
            return
        world.quiet(host)
        for leaf in host.leaves:
            leaf.content = leaf.content.next()
            fill(leaf.array, leaf.content)


@final
class CheckHost(Kind):
    name = "check_host"
    weight = 1.0

    def draw(self, sketch: Sketch) -> list[Step]:
        host = sketch.pick("host", own=True)
        return [] if host is None else [self.of(host)]

    def of(self, host: str) -> Step:
        """Return the step that looks at these."""
        return self.step(host=host)

    def run(self, world: World, **arguments: Any) -> None:
        world.check_host(world.find(arguments["host"], Host, own=True), arguments["host"])


ALL: tuple[type[Kind], ...] = (Make, Rewrite, CheckHost)
