"""Records as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.records import Record

__all__ = ["show"]

SMALL = 1024
"""Bytes. Below, the time of a call says something and the rate does not."""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(console: Console, records: Iterable[Record], absences: Mapping[str, str]) -> None:
    """Print a table per case, and who is absent and why."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(record["case"], []).append(record)
    for group in by_case.values():
        for small in (True, False):
            rows = [record for record in group if (record["nbytes"] < SMALL) == small]
            if rows:
                console.print(_table(rows, small=small))
    for name, reason in absences.items():
        console.print(f"absent: {name} ({reason})", markup=False)


def _table(records: list[Record], *, small: bool) -> Table:
    first = records[0]
    table = Table(title=f"{first['case']}: {first['backend']} on {_where(first)}, {'us a call' if small else 'GB/s'}")
    for heading in ("label", "direction", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("xferlib", "min", "max", "limit", "of limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peers", ratio=1)
    for record in records:
        table.add_row(*_row(record, small=small))
    return table


def _row(record: Record, *, small: bool) -> list[str]:
    moved = (2 if record["direction"] == "both" else 1) * record["nbytes"]

    def figure(seconds: float) -> str:
        return f"{seconds * 1e6:.2f}" if small else f"{moved / seconds / 1e9:.2f}"

    seconds = record["seconds"]
    # The slowest transfer has the lowest rate.
    low, high = (seconds["min"], seconds["max"]) if small else (seconds["max"], seconds["min"])
    peers = ", ".join(f"{name} {figure(value)}" for name, value in record["peers_seconds"].items())
    return [
        record["label"],
        record["direction"],
        _size(record["nbytes"]),
        *(figure(value) for value in (seconds["median"], low, high)),
        figure(moved / record["limit_gbps"] / 1e9),
        f"{record['of_limit']:.3f}",
        peers or "-",
    ]


def _where(record: Record) -> str:
    machine = record["machine"]
    return machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]


def _size(nbytes: int) -> str:
    return next((f"{nbytes // unit} {name}" for unit, name in UNITS if nbytes >= unit), f"{nbytes} B")
