"""The commands and their options. What a command does stands in a module that is imported when the command is run."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from xferlib.cli.command_error import CommandError

__all__ = ["app"]

app = typer.Typer(
    name="xferlib",
    help="Move arrays between host and GPU while the GPU computes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    as_version: Annotated[bool, typer.Option("--version", help="Print the version of xferlib and exit.")] = False,
) -> None:
    """Move arrays between host and GPU while the GPU computes. Without a command: what doctor shows."""
    if as_version:
        typer.echo(f"xferlib {version('xferlib')}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return
    from xferlib.cli.doctor import examine
    from xferlib.cli.doctor_page import show

    show(examine())
    typer.echo("\nxferlib demo          stream real pictures through the device, everything overlapped, and verify the result")
    typer.echo("xferlib conformance   run the laws against a backend: xferlib conformance NAME")
    typer.echo("xferlib overlap       measure how much of a copy is hidden under compute here: xferlib overlap NAME")
    typer.echo("xferlib trace         run a program and say which of its copies overlap: xferlib trace -- python train.py")
    typer.echo("xferlib doctor        this page; --json for machines")
    typer.echo("xferlib --help        all commands and options")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    require: Annotated[
        list[str] | None, typer.Option("--require", metavar="NAME", help="Exit with 1 if this backend is not ready. Repeatable.")
    ] = None,
) -> None:
    """Show which backends are installed, which are ready, and for the others what to type."""
    from xferlib.cli.doctor import examine, lacking
    from xferlib.cli.doctor_page import show

    report = examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)
    missing = lacking(report, require or [])
    for line in missing:
        typer.echo(f"xferlib: {line}", err=True)
    if missing:
        raise typer.Exit(1)


@app.command()
def demo(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A .npy file, (N, H, W), (N, H, W, C) or (H, W), of any size; or an image, or a folder of images (made grey, and "
            "fitted to the size of the first by name; its subfolders are not looked into, and what cannot be read is skipped and "
            "named). Without it: a photograph and measurements that come with Matplotlib."
        ),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="A backend that doctor lists, or auto.")] = "auto",
    device: Annotated[int, typer.Option(help="Which device of the backend.")] = 0,
    gib: Annotated[
        float | None,
        typer.Option(min=0.0, help="Repeat the frames, each copy shifted, to this size, in memory before the clock starts."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for edges.npy and edges.png; earlier ones are replaced. On a slow disk, try a folder in /dev/shm."
        ),
    ] = Path("xferlib-demo"),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures to this file, too. -: to stdout, and the table to stderr."),
    ] = None,
    batch_mib: Annotated[float | None, typer.Option(min=0.0, help="Size of a batch. Default: 32 on a GPU, 4 without.")] = None,
    depth: Annotated[int, typer.Option(min=2, help="Batches on their way at once, each way, beside those that are read.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read. Default: half of the cores, at most 8.")] = None,
    rounds: Annotated[
        str, typer.Option(metavar="N|auto", help="Rounds of blur. auto: as many as make compute take as long as H2D, at least 1.")
    ] = "auto",
    sheet: Annotated[
        bool, typer.Option(help="Draw edges.png, a dozen frames above their edges (needs Pillow and Matplotlib).")
    ] = True,
) -> None:
    """Stream pictures host -> device -> host with all stages overlapped, and verify the result.

    Four stages run at once: read into pinned memory, H2D, edges on the device, D2H into edges.npy.
    "Hidden" is (sum of the stages - total) / (sum - longest stage): 1 if the longest stage alone took the time, 0 if they ran one
    after the other. For H2D, compute and D2H the time alone counts, measured before the run (medians); for read the time that its
    threads were at work during the run, over the number of threads.
    A sample of frames is recomputed with NumPy from the source and compared, bit for bit, with the file.
    """
    from xferlib.cli.demo import Options, run
    from xferlib.cli.machine import require_settings
    from xferlib.engine.cores import usable_cores

    require_settings()
    run(
        Options(
            path=path,
            backend=backend,
            device=device,
            gib=gib,
            out=out,
            json_file=json_file,
            batch_mib=batch_mib,
            depth=depth,
            threads=threads or max(1, min(8, (usable_cores() - 1) // 2)),
            rounds=_rounds(rounds),
            sheet=sheet,
        )
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def conformance(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The backend to test. What follows goes to pytest.")],
) -> None:
    """Run the conformance suite, the laws that every backend keeps, against a backend on this machine.

    Exits with pytest's status; with 4, and the reason, if the backend cannot run here, so that nothing is tested.
    """
    from xferlib.cli.machine import require_settings

    require_settings()
    try:
        from xferlib.conformance.run_suite import run as run_suite
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise CommandError('the conformance suite needs pytest. Install it with: pip install "pytest>=9.0"') from error
    raise typer.Exit(run_suite(name, list(context.args)))


@app.command()
def overlap(
    name: Annotated[str, typer.Argument(help="A backend that doctor lists, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[int, typer.Option(help="Which device of the backend.")] = 0,
    mib: Annotated[int | None, typer.Option(min=1, help="Size of a copy. Default: 256 on a GPU, 16 without.")] = None,
) -> None:
    """Measure how much of a copy is hidden under compute on this machine, by xferlib and by the framework's own calls.

    Each copy is timed alone, and beside compute that takes longer: enqueued before it, and after. The share is (copy + compute -
    together) / copy: median, quartiles, least and greatest of several rounds. It takes some seconds.
    """
    from xferlib.cli.machine import require_settings
    from xferlib.overlap.measure import measure_overlap
    from xferlib.registry import stager

    require_settings()
    with stager(name, device=device) as opened:
        report = measure_overlap(opened, device=device, nbytes=None if mib is None else mib << 20)
    typer.echo(report.to_json() if as_json else str(report))


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    command: Annotated[list[str], typer.Argument(help="The program: -- python train.py ..., or -- python -m package ...")],
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Where the events go, for ui.perfetto.dev. An earlier file is replaced.")
    ] = Path("run.json"),
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the page goes: open it in a browser. An earlier one is replaced.")
    ] = Path("run.html"),
) -> None:
    """Run a Python program, record its copies and its compute, and say why they did not overlap: xferlib trace -- python train.py.

    Ends with the program's status. The summary goes to stderr.
    """
    from xferlib.cli.trace_program import run

    run(command, json_file, html)


def _rounds(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdecimal():
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a number nor auto", param_hint="--rounds")
