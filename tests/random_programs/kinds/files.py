"""Files of arrays, loaded."""

from __future__ import annotations

from typing import Any, final

import numpy as np

import xferlib
from tests.random_programs.content import EXTENSIONS, Content, Wrong, assert_holds
from tests.random_programs.kinds.kind import Kind, refusable
from tests.random_programs.program import Step
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import HOST, Device, World

__all__ = ["ALL"]


@final
class Load(Kind):
    name = "load"
    weight = 0.8

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        if stager is None:
            return []
        kind = sketch.random.choice(sketch.traits.files)
        groups = [
            sketch.palette.group(memory="pageable", most=4 << 20)
            for _ in range(1 if kind == "npy" else sketch.random.randint(1, 3))
        ]
        for group in groups:
            group[3] = "C"
            if group[1] in EXTENSIONS or group[1] == "complex128":
                group[1:3] = ["uint8", [100]]
        known = {"groups": groups, "form": "list", "device": sketch.seen(stager)["device"], "views": (), "foreign": False}
        name = sketch.add(sketch.name("d"), "device", **known)
        return [self.step(to=name, stager=stager, file=kind, groups=groups)]

    def run(self, world: World, **arguments: Any) -> None:
        opened, name, kind = world.stager(arguments["stager"]), arguments["to"], arguments["file"]
        groups = arguments["groups"]
        contents = [Content(f"{name}.{index}", 0, dtype, tuple(shape)) for index, (_, dtype, shape, *_) in enumerate(groups)]
        arrays = {f"x{index}": content.array() for index, content in enumerate(contents)}
        path = world.folder / f"{name}.{kind}"
        if kind == "npy":
            np.save(path, arrays["x0"])
        elif kind == "npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]  # It has names of its own for two arguments.
        else:
            from safetensors.numpy import save_file

            save_file(arrays, path)
        with refusable(opened):
            loaded = xferlib.load(path, opened.stager)
        found = [loaded] if kind == "npy" else [loaded[key] for key in arrays]
        if kind != "npy" and sorted(loaded) != sorted(arrays):
            raise Wrong(f"load gave {sorted(loaded)} instead of {sorted(arrays)}")
        device = Device(found, [[content] for content in contents], form="list", device=opened.device)
        device.order = {HOST}
        world.things[name] = device
        path.unlink()
        for array, content in zip(found, contents, strict=True):
            assert_holds(world.kit.read(array), content, f"what load gave of a .{kind} file")


ALL: tuple[type[Kind], ...] = (Load,)
