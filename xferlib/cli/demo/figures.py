"""The figures of one demo: as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xferlib.cli.demo.loop import Timings
from xferlib.cli.demo.options import Options
from xferlib.cli.demo.source import FrameSource
from xferlib.cli.diagnosis import diagnosis, own_versions
from xferlib.stager import Stager
from xferlib.words import counted
from xferlib.workload import EdgeSpec

__all__ = ["device_words", "figures", "hidden_share", "show"]

EXPLANATION = {
    "hidden": "(sum of stages - total) / (sum of stages - longest stage): 1 if the longest stage alone took the time, 0 if the "
    "stages ran one after the other",
    "stages": "seconds for all frames. h2d, compute, d2h: measured alone before the run, median per batch times the number of "
    "batches; d2h to pageable memory, as the file is. read: time at work, not waiting, during the run, over the number of threads",
    "total_seconds": "wall time from the first read until the last result is in the file. Before it, and not counted: a source "
    "made by tiling, the result file reserved and every page of it touched, a rehearsal. After it, and not counted: flush_seconds",
    "gbps": "bytes of that direction over total_seconds, in 1e9 bytes per second",
    "verified": "true only if every frame of verified_frames, recomputed with NumPy from the source, equals the file bit for bit",
    "skipped": "images of the folder that cannot be read, and why",
    "subfolders": "folders in the folder, which were not looked into",
}
MEASURABLE_SECONDS = 0.01
"""A run that is over sooner was mostly threads waking up."""
TELLING = 0.25
"""If the other stages take less than this share of the longest, the spread of the longest drowns what they hide."""
MOST_NAMES = 5


def figures(
    options: Options, source: FrameSource, spec: EdgeSpec, rounds: int, alone: Mapping[str, float], run: Timings, stager: Stager
) -> dict[str, Any]:
    """Return all that is known before the result is verified."""
    h2d_nbytes, d2h_nbytes = source.frames * spec.frame_nbytes, source.frames * spec.height * spec.width
    stages = {"read": run.read_seconds}
    stages |= {name: seconds * source.frames / spec.frames for name, seconds in alone.items()}
    stats = stager.stats()
    told = diagnosis(stager.name)
    return {
        "source": source.label,
        "skipped": dict(source.skipped),
        "subfolders": list(source.subfolders),
        "backend": stager.name,
        "device": stager.device,
        "on_gpu": stager.on_gpu,
        "frames": source.frames,
        "frame_shape": list(spec.frame_shape),
        "dtype": spec.dtype.name,
        "batch_frames": spec.frames,
        "batch_nbytes": spec.frames * spec.frame_nbytes,
        "depth": options.depth,
        "threads": options.threads,
        "rounds": rounds,
        "h2d_nbytes": h2d_nbytes,
        "d2h_nbytes": d2h_nbytes,
        "h2d_gbps": h2d_nbytes / run.total_seconds / 1e9,
        "d2h_gbps": d2h_nbytes / run.total_seconds / 1e9,
        "stages": stages,
        "total_seconds": run.total_seconds,
        "hidden": hidden_share(stages, run.total_seconds),
        "pinned_peak_nbytes": stats.pinned_peak_nbytes,
        "synchronous": stats.synchronous,
        "versions": own_versions() | (told.versions() if told else {}),
        "explanation": EXPLANATION,
        "result": str(options.result),
        "sheet": str(options.result.with_suffix(".png")) if options.sheet else None,
    }


def hidden_share(stages: Mapping[str, float], total: float) -> float | None:
    """Return (sum - total) / (sum - max), unclamped; None where nothing could be hidden."""
    sum_, longest = sum(stages.values()), max(stages.values())
    return (sum_ - total) / (sum_ - longest) if sum_ > longest else None


def device_words(report: Mapping[str, Any]) -> str:
    """Return the backend and what it runs on, for people."""
    return f"{report['backend']} on {report['device'] if report['on_gpu'] else 'the CPU'}"


def show(report: Mapping[str, Any], *, to_stderr: bool = False) -> None:
    """Print the table."""
    table = Table(title=f"xferlib demo: {escape(report['source'])}", title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(report):
        table.add_row(name, text if name == "verified" else escape(text))
    Console(stderr=to_stderr).print(table)


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shape = " x ".join(map(str, report["frame_shape"]))
    skipped, subfolders = report["skipped"], report["subfolders"]
    yield "backend", device_words(report)
    batches = f"in batches of {report['batch_frames']:,}" if report["frames"] > report["batch_frames"] else "in one batch"
    yield "frames", f"{report['frames']:,} of {shape} {report['dtype']}, {batches}, depth {report['depth']}"
    if skipped:
        yield "skipped", f"{counted(len(skipped), 'image')} that cannot be read: {_some(skipped)}"
    if subfolders:
        yield "not looked into", f"{counted(len(subfolders), 'subfolder')}: {_some(subfolders)}"
    yield "threads", f"{report['threads']} to read, beside those of xferlib"
    for direction in ("h2d", "d2h"):
        nbytes, gbps = report[f"{direction}_nbytes"], report[f"{direction}_gbps"]
        yield direction.upper(), f"{_bytes(nbytes)}, {gbps:.2f} GB/s over the whole run"
    yield "total", _seconds(report["total_seconds"])
    for name, seconds in report["stages"].items():
        label = f"compute (blur x {report['rounds']})" if name == "compute" else name
        yield f"  {label}", f"{_seconds(seconds)} {'busy in the run' if name == 'read' else 'alone'}"
    yield "hidden", _hidden(report)
    yield "pinned peak", _bytes(report["pinned_peak_nbytes"])
    yield "result", f"{report['result']} (flushed in {report['flush_seconds']:.1f} s)"
    if report["sheet"]:
        yield "contact sheet", report["sheet"]
    yield "verified", _verdict(report)


def _hidden(report: Mapping[str, Any]) -> str:
    hidden: float | None = report["hidden"]
    stages: Mapping[str, float] = report["stages"]
    longest = max(stages, key=stages.__getitem__)
    beside = sum(stages.values()) - stages[longest]
    if report["frames"] <= report["batch_frames"]:
        return "nothing can be: all frames are in one batch"
    short = report["total_seconds"] < MEASURABLE_SECONDS
    untold = hidden is None or beside < TELLING * stages[longest]
    if not report["on_gpu"] and (short or untold or (hidden or 0) < 0):
        return f"a CPU cannot show it: its cores do all stages ({longest} {stages[longest]:.3f} s, the others {beside:.3f} s)"
    if short:
        return f"too little to tell: {report['total_seconds'] * 1e3:.1f} ms in total"
    if hidden is None or untold:
        return f"too little to tell: {beside:.3f} s beside a stage of {stages[longest]:.3f} s"
    if hidden < 0:
        return f"nothing: one after the other, the stages take {sum(stages.values()):.3f} s"
    return f"{hidden:.1%} of the {beside:.3f} s beside the longest stage"


def _verdict(report: Mapping[str, Any]) -> str:
    checked = counted(len(report["verified_frames"]), "frame")
    if report["verified"]:
        return f"[green]yes[/green]: {checked} recomputed with NumPy, all bits equal"
    wrong = [str(mismatch["frame"]) for mismatch in report["mismatches"]]
    return f"[red]NO[/red]: {len(wrong)} of {checked} recomputed with NumPy differ: {', '.join(wrong)}"


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = len(every) - MOST_NAMES
    return ", ".join(every[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
