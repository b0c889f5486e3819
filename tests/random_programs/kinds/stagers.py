"""Opening, trimming and closing stagers."""

from __future__ import annotations

from typing import Any, ClassVar, final

import xferlib
from tests.random_programs.content import Wrong
from tests.random_programs.kinds.kind import Kind
from tests.random_programs.program import Step
from tests.random_programs.sizes import LIMITS
from tests.random_programs.sketch import Sketch
from tests.random_programs.world import Host, Opened, World

__all__ = ["ALL", "check_figures"]

PLENTY = 192 << 20


@final
class Open(Kind):
    name = "open"
    weight = 1.0
    on_threads = False

    def draw(self, sketch: Sketch) -> list[Step]:
        if len(sketch.names("stager")) >= 3:
            return []
        random, palette = sketch.random, sketch.palette
        if palette.large:
            return [self._limited(sketch)]
        most = max(palette.most_nbytes, 1 << 20)
        tight = sketch.chance(0.15)
        options: dict[str, Any] = {
            "device": random.randrange(sketch.traits.devices),
            "staging": palette.staging,
            "pinned_limit": 4 * most + (1 << 20) if tight else PLENTY,
            "device_limit": random.choice((None, 3 * most)) if tight else None,
            "when_full": random.choice(("wait", "wait", "raise", "stage")),
        }
        return [self._with(sketch, tight=tight, options=options)]

    def _limited(self, sketch: Sketch) -> Step:
        """Return the step that opens a stager of a large program, with limits that its arrays may reach."""
        random = sketch.random
        limits = {
            "pinned_limit": random.choice(LIMITS),
            "device_limit": random.choice((None, None, 4 * sketch.palette.most_nbytes)),
        }
        options = {"device": random.randrange(sketch.traits.devices), "staging": sketch.palette.staging, **limits}
        return self._with(sketch, tight=True, options={**options, "when_full": random.choice(("wait", "wait", "raise", "stage"))})

    def _with(self, sketch: Sketch, *, tight: bool, options: dict[str, Any]) -> Step:
        name = sketch.add(sketch.name("s"), "stager", device=options["device"])
        return self.step(to=name, locks=sketch.chance(0.6), tight=tight, options=options)

    def run(self, world: World, **arguments: Any) -> None:
        options = dict(arguments["options"])
        device = options.pop("device")
        if options["staging"] is not None:
            options["staging"] = xferlib.StagingProfile(*options["staging"])
        backend = world.kit.open(device, locks=arguments["locks"])
        stager = xferlib.stager(backend, **options)
        world.things[arguments["to"]] = Opened(stager, device, tight=arguments["tight"])


@final
class Trim(Kind):
    name = "trim"
    weight = 1.0

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        return [] if stager is None else [self.step(stager=stager)]

    def run(self, world: World, **arguments: Any) -> None:
        world.stager(arguments["stager"]).stager.trim()


@final
class Stats(Kind):
    name = "stats"
    weight = 0.5

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        return [] if stager is None else [self.step(stager=stager)]

    def run(self, world: World, **arguments: Any) -> None:
        check_figures(world.find(arguments["stager"], Opened).stager)


def check_figures(stager: xferlib.Stager) -> None:
    """Raise `Wrong` where a stager has, or has had, less memory than none, or more than its limits allow."""
    stats = stager.stats()
    figures = (stats.pinned_nbytes, stats.pinned_used_nbytes, stats.device_nbytes, stats.h2d_nbytes, stats.d2h_nbytes)
    if min(figures) < 0:
        raise Wrong(f"figures below nothing: {stats}")
    if stats.pinned_peak_nbytes > stats.pinned_limit_nbytes:
        raise Wrong(f"pinned_limit was exceeded: {stats}")
    if stats.device_limit_nbytes is not None and stats.device_peak_nbytes > stats.device_limit_nbytes:
        raise Wrong(f"device_limit was exceeded: {stats}")


@final
class Close(Kind):
    """Close a stager while arrays, transfers and pinned memory of it live on."""

    name = "close"
    weight = 0.6
    on_threads = False
    kept: ClassVar[tuple[str, ...]] = ("host", "device", "transfer")

    def draw(self, sketch: Sketch) -> list[Step]:
        stager = sketch.pick("stager")
        if stager is None:
            return []
        sketch.gone(stager)
        steps = [self.step(stager=stager, twice=sketch.chance(0.2))]
        return steps + Open().draw(sketch) if sketch.chance(0.5) else steps

    def run(self, world: World, **arguments: Any) -> None:
        opened = world.stager(arguments["stager"])
        # What it has locked is unlocked now, and others may be reading it.
        for host in world.all(Host):
            if any(leaf.locked and leaf.memory not in ("pinned", "view") for leaf in host.leaves):
                world.quiet(host)
        opened.stager.close()
        opened.closed = True
        if arguments["twice"]:
            opened.stager.close()
        try:
            opened.stager.empty_pinned(1, "uint8")
        except xferlib.ClosedError:
            return
        raise Wrong("a closed stager gave pinned memory")


ALL: tuple[type[Kind], ...] = (Open, Trim, Stats, Close)
