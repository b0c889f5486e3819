"""Preparation and the run itself: everything between a plan and a finished file.

Before the clock: the tiled source is made, every page of the result is touched, all slots are filled, compute is tuned, some
batches are rehearsed into memory that is thrown away, and H2D, compute and D2H are measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xferlib.cli.demo.pipeline import Pipeline, Run, batches
from xferlib.cli.demo.plan import Plan
from xferlib.cli.demo.progress import Bar
from xferlib.cli.demo.result import ResultFile
from xferlib.cli.demo.source import Source
from xferlib.cli.demo.stages import Alone, measure, tune
from xferlib.cli.demo.team import Team, copy
from xferlib.cli.demo.tile import TiledSource
from xferlib.stager import Stager
from xferlib.workload import Workload

__all__ = ["Streamed", "stream"]


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What a run leaves behind. `source` is what was read: the plan's, or that one tiled."""

    source: Source
    rounds: int
    alone: Alone
    run: Run
    flush_seconds: float


def stream(
    plan: Plan, stager: Stager, workload: Workload, path: Path, *, device: int, rounds: int | None, team: Team, bar: Bar
) -> Streamed:
    """Write the edges of all frames to `path`. `rounds=None`: tuned. Whatever it raises, there is no unfinished file."""
    spec = plan.spec
    bar.phase("preparing")
    source = TiledSource(plan.source, plan.frames, team) if plan.tiled else plan.source
    with ResultFile(path, (plan.frames, spec.height, spec.width)) as result:
        result.touch(team)
        with workload.edge_job(spec, device=device) as job:
            pipeline = Pipeline(stager, job, spec, threads=plan.threads)
            team.each(lambda slot: source.read(0, slot), pipeline.slots)
            bar.phase("measuring")
            rounds = tune(pipeline) if rounds is None else rounds
            _rehearse(pipeline, plan, source, rounds)
            alone = measure(pipeline, rounds=rounds)
            bar.phase("streaming", plan.frames)
            run = pipeline.run(
                batches(plan.frames, spec.frames),
                rounds=rounds,
                read=source.read,
                write=result.write,
                progress=bar.advance,
            )
            # What failed on the device after its last result was read would be silent otherwise.
            job.synchronize()
        bar.phase("flushing")
        flush_seconds = result.finish()
    return Streamed(source=source, rounds=rounds, alone=alone, run=run, flush_seconds=flush_seconds)


def _rehearse(pipeline: Pipeline, plan: Plan, source: Source, rounds: int) -> None:
    """Run a few batches for every thread, pool and kernel to have run once. The file is not touched: it must be the run's own."""
    thrown_away = np.empty((plan.spec.frames, plan.spec.height, plan.spec.width), np.uint8)
    pipeline.run(
        batches(plan.frames, plan.spec.frames)[: len(pipeline.slots)],
        rounds=rounds,
        read=source.read,
        write=lambda start, frames: copy(thrown_away[: len(frames)], frames),
    )
