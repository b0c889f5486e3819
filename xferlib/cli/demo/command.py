"""The order of events: open, plan, stream, verify, draw, report."""

from __future__ import annotations

import json
from typing import Any

import typer

from xferlib.cli.companions import workload
from xferlib.cli.demo import sheet, verify
from xferlib.cli.demo.plan import Options, Plan, make_plan, open_source
from xferlib.cli.demo.progress import Bar
from xferlib.cli.demo.report import figures, show
from xferlib.cli.demo.stream import Streamed, stream
from xferlib.cli.demo.team import Team
from xferlib.registry import stager as open_stager
from xferlib.stager import Stager

__all__ = ["run"]


def run(options: Options) -> None:
    """Run the demo. Raises `XferError` for what it cannot work with, and `typer.Exit(1)` if the result is wrong."""
    source = open_source(options)
    try:
        with Bar() as bar, open_stager(options.backend, device=options.device) as stager:
            report = _carry_out(options, make_plan(options, source, stager), stager, bar)
    except KeyboardInterrupt:
        typer.echo("xferlib: interrupted: nothing was verified, and an unfinished result was removed", err=True)
        raise typer.Exit(130) from None
    show(report)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    if not report["verified"]:
        typer.echo(f"xferlib: the result is wrong, see the table: {report['result']}", err=True)
        raise typer.Exit(1)


def _carry_out(options: Options, plan: Plan, stager: Stager, bar: Bar) -> dict[str, Any]:
    with Team() as team:
        streamed = stream(
            plan,
            stager,
            workload(stager.name),
            options.result,
            device=options.device,
            rounds=options.rounds,
            team=team,
            bar=bar,
        )
        bar.phase("verifying")
        pixels = plan.spec.height * plan.spec.width
        numbers = verify.sample(plan.frames, plan.spec.frames, work=pixels * (streamed.rounds + 4))
        wrong = verify.compare(streamed.source, options.result, numbers, rounds=streamed.rounds, team=team)
    report = figures(plan, streamed, stager) | {
        "result": str(options.result),
        "sheet": None,
        "verified": not wrong,
        "verified_frames": numbers,
        "mismatches": [mismatch._asdict() for mismatch in wrong],
    }
    if options.sheet:
        bar.phase("drawing")
        report["sheet"] = _draw(options, streamed, report)
    return report


def _draw(options: Options, streamed: Streamed, report: dict[str, Any]) -> str:
    path = options.result.with_suffix(".png")
    rounds = f"{streamed.rounds} round{'' if streamed.rounds == 1 else 's'} of blur"
    sheet.draw(
        path,
        streamed.source,
        options.result,
        title=f"{streamed.source.frames:,} frames and their edges",
        subtitle=f"{streamed.source.label}  ·  normalised, {rounds}, Sobel  ·  {report['backend']} on {report['device']}  ·  "
        f"{'verified' if report['verified'] else 'WRONG'}",
    )
    return str(path)
