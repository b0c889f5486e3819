"""The contact sheet: a dozen frames, each above its edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xferlib.cli.demo import reference
from xferlib.cli.demo.figures import device_words
from xferlib.cli.demo.source import FrameSource
from xferlib.words import counted

__all__ = ["draw"]

PICTURES, COLUMNS = 12, 6
PAPER, INK, FAINT = "#14161a", "#eceff4", "#8d96a5"
CELL, GAP, CAPTION, HEAD, FOOT = 2.2, 0.08, 0.3, 0.6, 0.45
"""Inches."""
MOST_PIXELS = 512
"""Along an axis: more pixels would only be thrown away when drawn."""


def draw(source: FrameSource, report: Mapping[str, Any]) -> None:
    """Write the PNG that the report names. Edges are drawn brighter than they are where blur made them faint."""
    from matplotlib.figure import Figure

    written = np.load(report["result"], mmap_mode="r")
    title = f"{counted(source.frames, 'frame')} and {'their' if source.frames > 1 else 'its'} edges"
    verdict = "verified" if report["verified"] else "WRONG"
    blur = f"normalised, {counted(report['rounds'], 'round')} of blur, Sobel"
    subtitle = f"{source.label}  ·  {blur}  ·  {device_words(report)}  ·  {verdict}"
    numbers = sorted({round((source.frames - 1) * part / (PICTURES - 1)) for part in range(PICTURES)})
    columns = min(COLUMNS, len(numbers))
    lines = -(-len(numbers) // columns)
    height, width = source.frame_shape[:2]
    tall = CELL * min(2.5, max(0.25, height / width))
    across = max(3, columns) * (CELL + GAP) + GAP
    down = HEAD + lines * (CAPTION + 2 * (tall + GAP)) + FOOT
    figure = Figure(figsize=(across, down), dpi=110, facecolor=PAPER)
    figure.text(0.5, 1 - 0.5 * HEAD / down, title, color=INK, fontsize=15, fontweight="bold", ha="center", va="center")
    figure.text(0.5, 0.5 * FOOT / down, subtitle, color=FAINT, fontsize=9, ha="center", va="center", wrap=True)
    margin = (across - columns * (CELL + GAP) + GAP) / 2
    for place, number in enumerate(numbers):
        line, column = divmod(place, columns)
        left = margin + column * (CELL + GAP)
        top = down - HEAD - line * (CAPTION + 2 * (tall + GAP)) - CAPTION
        picture, edges = _thin(source.original(number)), _thin(written[number])
        above = figure.add_axes((left / across, (top - tall) / down, CELL / across, tall / down))
        above.set_title(f"frame {number:,}", color=FAINT, fontsize=9, pad=4)
        above.imshow(reference.normalised(reference.grey(picture)), cmap="gray", vmin=0, vmax=255, aspect="auto")
        below = figure.add_axes((left / across, (top - 2 * tall - GAP) / down, CELL / across, tall / down))
        below.imshow(edges, cmap="magma", vmin=0, vmax=max(1.0, float(np.percentile(edges, 99.5))), aspect="auto")
        above.set_axis_off()
        below.set_axis_off()
    figure.savefig(report["sheet"], facecolor=PAPER)


def _thin(picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
    step_down, step_across = (-(-length // MOST_PIXELS) for length in picture.shape[:2])
    return picture[::step_down, ::step_across]
