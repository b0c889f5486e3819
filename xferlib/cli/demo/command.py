"""The order of events: open, plan, prepare, stream, verify, draw, report."""

from __future__ import annotations

import json
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import typer

from xferlib.cli.command_error import CommandError
from xferlib.cli.demo import sheet, verify
from xferlib.cli.demo.figures import figures, show
from xferlib.cli.demo.loop import Loop
from xferlib.cli.demo.options import Options, open_source, plan
from xferlib.cli.demo.progress_bar import Bar
from xferlib.cli.demo.result import ResultFile
from xferlib.cli.demo.source import tiled
from xferlib.engine.cores import usable_cores
from xferlib.pipeline.ring import Ring
from xferlib.registry import stager as open_stager
from xferlib.registry import workload_of
from xferlib.tracing.termination import Termination

__all__ = ["run"]


def run(options: Options) -> None:
    """Run the demo. Raises `XferError` for what it cannot work with, and `typer.Exit(1)` if the result is wrong."""
    try:
        # SIGTERM comes as `SystemExit`: by itself it would leave the unfinished result.
        with (
            Termination(),
            Bar() as bar,
            ThreadPoolExecutor(usable_cores()) as pool,
            ThreadPoolExecutor(options.threads) as readers,
        ):
            report = _carry_out(options, pool, readers, bar)
    except KeyboardInterrupt:
        typer.echo("xferlib: interrupted: nothing was verified, and no unfinished result is left", err=True)
        raise typer.Exit(130) from None
    except SystemExit:
        typer.echo("xferlib: terminated: nothing was verified, and no unfinished result is left", err=True)
        raise
    show(report, to_stderr=options.to_stdout)
    text = json.dumps(report, indent=2)
    if options.to_stdout:
        typer.echo(text)
    elif options.json_file is not None:
        try:
            options.json_file.write_text(text + "\n")
        except OSError as error:
            raise CommandError(f"cannot write {str(options.json_file)!r}: {error}. Name another file with --json") from error
    if not report["verified"]:
        typer.echo(f"xferlib: the result is wrong, see the table: {report['result']}", err=True)
        raise typer.Exit(1)


def _carry_out(options: Options, pool: Executor, readers: Executor, bar: Bar) -> dict[str, Any]:
    """Stream, verify and draw. Whatever it raises, no unfinished file is left."""
    depth, threads = options.depth, options.threads
    bar.phase("opening")
    source = open_source(options, pool)
    with open_stager(options.backend, device=options.device) as stager:
        try:
            stager.backend.check_dtype(source.dtype)
        except TypeError as error:
            raise CommandError(f"{options.path or 'the pictures'}: {error}") from None
        frames, spec = plan(options, source, stager)
        device_work = workload_of(stager.name)
        bar.phase("preparing")
        if options.tiled:
            source = tiled(source, frames, pool)
        with (
            ResultFile(options.result, (frames, spec.height, spec.width)) as result,
            Ring(stager, ((spec.frames, *spec.frame_shape), spec.dtype), slots=depth + threads) as ring,
            device_work.edge_job(spec, device=options.device) as job,
        ):
            result.touch(pool)
            loop = Loop(stager, ring, job, spec, source, readers, threads=threads, depth=depth)
            bar.phase("measuring")
            rounds, alone = loop.alone(options.rounds)
            bar.phase("rehearsing")
            # So that every thread, pool and kernel has run once, also on a last batch that is smaller. The file is not touched: it
            # must come from the run alone.
            rehearsed = min(frames, ring.slots * spec.frames + frames % spec.frames)
            loop.run(rehearsed, rounds=rounds, out=np.empty((rehearsed, spec.height, spec.width), np.uint8))
            bar.phase("streaming", frames)
            streamed = loop.run(frames, rounds=rounds, out=result.frames, progress=bar.advance)
            bar.phase("flushing")
            flush_seconds = result.finish()
        report = figures(options, source, spec, rounds, alone, streamed, stager) | {"flush_seconds": flush_seconds}
    bar.phase("verifying")
    report |= verify.compare(source, options.result, spec, rounds=rounds, pool=pool)
    if options.sheet:
        bar.phase("drawing")
        sheet.draw(source, report)
    return report
