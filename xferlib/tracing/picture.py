"""A recording as a picture, for notebooks. Needs Matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xferlib.errors import XferError
from xferlib.tracing.events import Recording
from xferlib.tracing.gaps import all_gaps
from xferlib.tracing.rows import rows, thinned
from xferlib.tracing.summary import summarize

__all__ = ["write"]

COLORS: Mapping[str, str] = {
    # Those of the page where it is light.
    "h2d": "#2f6fde",
    "d2h": "#d9730d",
    "kernel": "#3c9a5f",
    "copy": "#8e7cc3",
    "memset": "#8e7cc3",
    "put": "#1599a0",
    "get": "#1599a0",
    "source": "#7a4b2a",
    "wait": "#7a4b2a",
    "allocation": "#b0419b",
    "issue": "#7f8fa6",
    "range": "#b7a35a",
    "gap": "#c94f4f",
}
EDGE_POINTS = 0.6
"""A pixel."""
MARKS_ACROSS = 2000
"""What is closer together than this part of the time is drawn as one: it would be less than a pixel."""


def write(recording: Recording, path: Path) -> None:
    """Draw the rows into a file, of the kind that its name says. Raises `XferError` without Matplotlib."""
    if path.is_dir():
        # Matplotlib would make a hidden file there.
        raise IsADirectoryError(f"{str(path)!r} is a folder. Name a file in it, such as {str(path / 'run.png')!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise XferError("drawing needs Matplotlib. Install it with: pip install matplotlib") from error
    gaps = all_gaps(recording)
    drawn = thinned(rows(recording, gaps), (recording.end - recording.start) // MARKS_ACROSS)
    lanes = [(row, level, lane) for row in drawn for level, lane in enumerate(row.lanes)]
    figure = Figure(figsize=(12, 1.6 + 0.24 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    seen: dict[str, str] = {}
    for place, (_, _, lane) in enumerate(lanes):
        for kind in dict.fromkeys(mark.kind for mark in lane):
            spans = [(mark.start / 1e6, max(mark.end - mark.start, 1) / 1e6) for mark in lane if mark.kind == kind]
            # With an edge: what is narrower than a pixel would be pale, or not there at all.
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=COLORS[kind], edgecolors=COLORS[kind], linewidths=EDGE_POINTS)
            seen[kind] = COLORS[kind]
    axes.set_yticks(range(len(lanes)), [f"{row.group}: {row.name}" if level == 0 else "" for row, level, _ in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4 if lanes else 1, -0.6)
    axes.set_xlabel("ms since the trace began")
    axes.spines[["top", "right"]].set_visible(False)
    summary = summarize(recording, gaps)
    axes.set_title("\n".join(finding.words for finding in summary.findings[:2]) or summary.verdict, fontsize=9, loc="left")
    if seen:
        handles = [Patch(color=color, label=kind) for kind, color in seen.items()]
        figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=120)
