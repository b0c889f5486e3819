"""The figures of one demo: as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xferlib.cli.companions import diagnosis, own_versions
from xferlib.cli.demo.plan import Plan
from xferlib.cli.demo.stream import Streamed
from xferlib.stager import Stager

__all__ = ["figures", "hidden_share", "show"]

EXPLANATION = {
    "hidden": "(sum of stages - total) / (sum of stages - longest stage): 1 if the longest stage alone took the time, 0 if the "
    "stages ran one after the other",
    "stages": "seconds for all frames. h2d, compute, d2h: measured alone before the run, median per batch times the number of "
    "batches. read, write: time at work, not waiting, during the run, over the number of threads",
    "total_seconds": "wall time from the first read to the end of the last write. Before it, and not counted: a source made by "
    "tiling, the result file reserved and every page of it touched, a rehearsal. After it, and not counted: flush_seconds",
    "gbps": "bytes of that direction over total_seconds, in 1e9 bytes per second",
    "verified": "true only if every frame of verified_frames, recomputed with NumPy from the source, equals the file bit for bit",
}


def figures(plan: Plan, streamed: Streamed, stager: Stager) -> dict[str, Any]:
    """Return all that is known before the result is verified."""
    spec, run, alone = plan.spec, streamed.run, streamed.alone
    h2d_nbytes, d2h_nbytes = plan.frames * spec.frame_nbytes, plan.frames * spec.height * spec.width
    full_batches = plan.frames / spec.frames
    stages = {
        "read": run.read_seconds,
        "h2d": alone.h2d * full_batches,
        "compute": alone.compute * full_batches,
        "d2h": alone.d2h * full_batches,
        "write": run.write_seconds,
    }
    stats = stager.stats()
    told = diagnosis(stager.name)
    return {
        "source": streamed.source.label,
        "backend": stager.name,
        "device": stager.device,
        "on_gpu": stager.on_gpu,
        "frames": plan.frames,
        "frame_shape": list(spec.frame_shape),
        "dtype": spec.dtype.name,
        "batch_frames": spec.frames,
        "batch_nbytes": spec.frames * spec.frame_nbytes,
        "depth": spec.slots - plan.threads,
        "threads": plan.threads,
        "rounds": streamed.rounds,
        "h2d_nbytes": h2d_nbytes,
        "d2h_nbytes": d2h_nbytes,
        "h2d_gbps": h2d_nbytes / run.total_seconds / 1e9,
        "d2h_gbps": d2h_nbytes / run.total_seconds / 1e9,
        "stages": stages,
        "total_seconds": run.total_seconds,
        "hidden": hidden_share(stages, run.total_seconds),
        "flush_seconds": streamed.flush_seconds,
        "pinned_peak_nbytes": stats.pinned_peak_nbytes,
        "synchronous": stats.synchronous,
        "versions": own_versions() | (told.versions() if told else {}),
        "explanation": EXPLANATION,
    }


MEASURABLE_SECONDS = 0.01
"""A run that is over sooner was mostly threads waking up."""
TELLING = 0.25
"""Where the other stages take less than this share of the longest, the spread of that one drowns what they hide."""


def hidden_share(stages: Mapping[str, float], total: float) -> float | None:
    """Return (sum - total) / (sum - max), unclamped; None where nothing could be hidden."""
    sum_, longest = sum(stages.values()), max(stages.values())
    return (sum_ - total) / (sum_ - longest) if sum_ > longest else None


def show(report: Mapping[str, Any]) -> None:
    """Print the table."""
    console = Console()
    table = Table(title=f"xferlib demo: {escape(report['source'])}", title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(report):
        table.add_row(name, text if name == "verified" else escape(text))
    console.print(table)


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    stages: Mapping[str, float] = report["stages"]
    frames = f"{report['frames']:,} of {' x '.join(map(str, report['frame_shape']))} {report['dtype']}"
    rows = [
        ("backend", f"{report['backend']} on {report['device']}"),
        ("frames", f"{frames}, in batches of {report['batch_frames']:,}, depth {report['depth']}"),
        ("threads", f"{report['threads']} to read, {report['threads']} to write"),
        ("H2D", f"{_bytes(report['h2d_nbytes'])}, {report['h2d_gbps']:.2f} GB/s over the whole run"),
        ("D2H", f"{_bytes(report['d2h_nbytes'])}, {report['d2h_gbps']:.2f} GB/s over the whole run"),
        ("total", f"{report['total_seconds']:.3f} s"),
    ]
    for name, seconds in stages.items():
        how = "busy in the run" if name in ("read", "write") else "alone"
        label = f"compute (blur x {report['rounds']})" if name == "compute" else name
        rows.append((f"  {label}", f"{seconds:.3f} s {how}"))
    rows += [
        ("hidden", _hidden(report)),
        ("pinned peak", _bytes(report["pinned_peak_nbytes"])),
        ("result", f"{report['result']} (flushed in {report['flush_seconds']:.1f} s)"),
    ]
    if report["sheet"]:
        rows.append(("contact sheet", report["sheet"]))
    rows.append(("verified", _verdict(report)))
    return rows


def _hidden(report: Mapping[str, Any]) -> str:
    hidden: float | None = report["hidden"]
    total: float = report["total_seconds"]
    sum_, longest = sum(report["stages"].values()), max(report["stages"].values())
    beside = sum_ - longest
    if report["frames"] <= report["batch_frames"]:
        return "nothing can be: all frames are in one batch"
    if total < MEASURABLE_SECONDS:
        return f"too little to tell: {total * 1e3:.1f} ms in total"
    if hidden is None or beside < TELLING * longest:
        return f"too little to tell: {beside:.3f} s beside a stage of {longest:.3f} s"
    if hidden < 0:
        return f"nothing: one after the other, the stages take {sum_:.3f} s"
    return f"{hidden:.1%} of the {beside:.3f} s beside the longest stage"


def _verdict(report: Mapping[str, Any]) -> str:
    checked = len(report["verified_frames"])
    if report["verified"]:
        return f"[green]yes[/green]: {checked} frames recomputed with NumPy, all bits equal"
    wrong = [str(mismatch["frame"]) for mismatch in report["mismatches"]]
    return f"[red]NO[/red]: {len(wrong)} of {checked} frames differ: {', '.join(wrong)}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
