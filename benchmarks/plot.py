"""Draw the share of the link's rate that ours and the peers reach, over the size: `python benchmarks/plot.py FILE PICTURE`.

An SVG says in its description what is drawn, so that anybody can check whether it shows the present records. It follows the
reader's choice of a light or a dark page.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "is_of", "main"]

INSTALL = "matplotlib is not installed. Install it with: pip install 'matplotlib>=3.8'"
PANEL = (6.0, 3.8)
"""Inches."""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
WAYS = {"h2d": "host to device", "d2h": "device to host"}
DARK = {"#1a1a1b": "#e6e6e7", "#fefefe": "#131416"}
"""For the foreground and the background: the colour on a light page, and on a dark one. Nothing else has these colours."""
INK, PAPER = DARK
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), PAPER),
    "legend.edgecolor": "grey",
    # Text as letters, and names of parts that are the same each time.
    "svg.fonttype": "none",
    "svg.hashsalt": "sizes",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for and return the exit status."""
    options = _parser().parse_args(arguments)
    records = [one for one in json.loads(options.file.read_text()) if _is_asked(one, options)]
    if not records:
        print(f"{options.file} has no such records of the case 'sizes' with backend {options.backend!r}", file=sys.stderr)
        return 1
    try:
        draw(records, options.picture)
    except ModuleNotFoundError:
        print(INSTALL, file=sys.stderr)
        return 1
    return 0


def _is_asked(record: dict[str, Any], options: argparse.Namespace) -> bool:
    asked = not options.label or record["label"] in options.label
    return bool(record["case"] == "sizes" and record["backend"] == options.backend and asked)


def draw(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw records of the case `sizes`, of one backend. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        _draw(records, picture)


def is_of(picture: Path, records: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether an SVG was drawn from these records. Needs no matplotlib."""
    return picture.exists() and f">{html.escape(_described(records), quote=False)}<" in picture.read_text()


def _described(records: Sequence[Mapping[str, Any]]) -> str:
    """Return all that a picture of these records shows, in words."""
    points = [
        f"{one['direction']} {one['label']}, {_size(one['nbytes'])} at {one['limit_gbps']} GB/s: xferlib {one['of_limit']}"
        + "".join(f", {peer} {one['peers'][peer]}" for peer in sorted(one["peers"]))
        for one in sorted(records, key=lambda one: (one["direction"], one["label"], one["nbytes"]))
    ]
    return "\n".join([_title(records), *points])


def _title(records: Sequence[Mapping[str, Any]]) -> str:
    first = records[0]
    return f"{first['backend']} on {first['machine'].get('gpu')}, pageable memory, default arguments"


def _draw(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
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
    figure.suptitle(_title(records))
    if picture.suffix != ".svg":
        figure.savefig(picture)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Description": _described(records)})
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    picture.write_text("\n".join(lines).replace("<defs>", f"<style>{_dark_page()}</style>\n <defs>", 1) + "\n")


def _dark_page() -> str:
    """Return the rules that make a picture dark on a dark page. They are stronger than the styles of its parts."""
    rules = [
        f'[style*="{part}: {light}"] {{{part}: {dark} !important}}' for light, dark in DARK.items() for part in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark) {{{' '.join(rules)}}}"


def _panel(axes: Axes, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the peers of all sizes first, so that ours lies above them."""
    for name in sorted({peer for one in records for peer in one["peers"]}):
        points = [(one["nbytes"], one["peers"][name] / one["limit_gbps"]) for one in records if name in one["peers"]]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=name)
    sizes = [one["nbytes"] for one in records]
    axes.plot(sizes, [one["of_limit"] for one in records], marker="o", linewidth=2.5, color=INK, label="xferlib")
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
