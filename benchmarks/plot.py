"""Draw what part of the link's rate is reached over the size, ours and the peers': `python benchmarks/plot.py FILE PICTURE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "matplotlib is not installed. Install it with: pip install 'matplotlib>=3.8'"
PANEL = (6.0, 3.8)
"""Inches."""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
WAYS = {"h2d": "host to device", "d2h": "device to host"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for and return the exit status."""
    options = _parser().parse_args(arguments)
    records = [one for one in json.loads(options.file.read_text()) if _is_asked(one, options)]
    if not records:
        print(f"{options.file} has no such records of the case 'sizes' with backend {options.backend!r}", file=sys.stderr)
        return 1
    try:
        _draw(records, options.picture)
    except ModuleNotFoundError:
        print(INSTALL, file=sys.stderr)
        return 1
    return 0


def _is_asked(record: dict[str, Any], options: argparse.Namespace) -> bool:
    asked = not options.label or record["label"] in options.label
    return bool(record["case"] == "sizes" and record["backend"] == options.backend and asked)


def _draw(records: Sequence[dict[str, Any]], picture: Path) -> None:
    from matplotlib.figure import Figure

    by_way = {way: sorted({one["label"] for one in records if one["direction"] == way}) for way in WAYS}
    columns = [way for way in WAYS if by_way[way]]
    rows = max(map(len, by_way.values()))
    figure = Figure(figsize=(PANEL[0] * len(columns), PANEL[1] * rows), layout="constrained")
    panels = figure.subplots(rows, len(columns), squeeze=False)
    for column, way in enumerate(columns):
        for row in range(rows):
            if row >= len(by_way[way]):
                panels[row, column].set_axis_off()
                continue
            label = by_way[way][row]
            group = [one for one in records if (one["direction"], one["label"]) == (way, label)]
            _panel(panels[row, column], f"{WAYS[way]}: {label}", sorted(group, key=lambda one: one["nbytes"]))
    first = records[0]
    figure.suptitle(f"{first['backend']} on {first['machine'].get('gpu')}, pageable memory, default arguments")
    figure.savefig(picture)


def _panel(axes: Axes, title: str, records: Sequence[dict[str, Any]]) -> None:
    """Draw the peers of all sizes first, so that ours lies above them."""
    for name in sorted({peer for one in records for peer in one["peers"]}):
        points = [(one["nbytes"], one["peers"][name] / one["limit_gbps"]) for one in records if name in one["peers"]]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=name)
    sizes = [one["nbytes"] for one in records]
    axes.plot(sizes, [one["of_limit"] for one in records], marker="o", linewidth=2.5, color="black", label="xferlib")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_size(nbytes) for nbytes in sizes], fontsize=7)
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("of the bare pinned copy's rate")
    axes.legend(fontsize=6)


def _size(nbytes: int) -> str:
    return next((f"{nbytes // unit} {name}" for unit, name in UNITS if nbytes >= unit), f"{nbytes} B")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/plot.py", description="Draw the case 'sizes': share of the limit over size.")
    parser.add_argument("file", type=Path, help="of records, as run.py --json leaves it")
    parser.add_argument("picture", type=Path, help="SVG, PNG or PDF, by its suffix")
    parser.add_argument("--backend", default="cupy", metavar="NAME", help="whose records (default: cupy)")
    parser.add_argument("--label", action="append", help="draw this label only; may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
