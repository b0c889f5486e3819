"""Records as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.records import Record, key

__all__ = ["show", "show_ratios"]

CALLS = {"overhead", "bystander"}
STEPS = {"loop", "drain", "leaves", "loaders", "locking", "first_get", "saving"}
"""Cases whose times are of interest and not their rates: in us, and in ms."""
PER_SECOND = {"us": 1e6, "ms": 1e3}
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(console: Console, records: Iterable[Record], absences: Mapping[str, str]) -> None:
    """Print a table per case, and who is absent and why."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(record["case"], []).append(record)
    for case, group in by_case.items():
        console.print(_table(group, unit="us" if case in CALLS else "ms" if case in STEPS else "GB/s"))
        for record in group:
            _show_details(console, record)
    for name, reason in absences.items():
        console.print(f"absent: {name} ({reason})", markup=False)


def show_ratios(console: Console, old: Iterable[Record], new: Iterable[Record]) -> None:
    """Print a row for each record that both have: new over old, of the times and of what part of its own limit each reached.

    "slower" and "faster" are said where not even the best sample of one is as good as the worst of the other.
    """
    before = {key(record): record for record in old}
    table = Table(title="new over old")
    for heading in ("case", "backend", "label", "direction", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "of limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    after = {key(record): record for record in new}
    for one in sorted(after.keys() & before.keys()):
        _add_ratios(table, before[one], after[one])
    console.print(table)
    gone, added = len(before.keys() - after.keys()), len(after.keys() - before.keys())
    console.print(f"rows of one file alone: {gone} of the old, {added} of the new")
    for line in _differences([(before[one], after[one]) for one in after.keys() & before.keys()]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _differences(pairs: Iterable[tuple[Record, Record]]) -> list[str]:
    """Return in words what the records of a row were made on, and with, where it is not the same."""
    lines = set()
    for old, new in pairs:
        if _where(old) != _where(new):
            lines.add(f"not the same machine: {_where(old)}, then {_where(new)}. Compare the shares of the limit, not the times")
        # What only one of them names may have been installed for another case.
        for name in old["versions"].keys() & new["versions"].keys():
            if old["versions"][name] != new["versions"][name]:
                lines.add(f"not the same {name}: {old['versions'][name]}, then {new['versions'][name]}")
    return sorted(lines)


def _add_ratios(table: Table, old: Record, new: Record) -> None:
    words = new["case"], new["backend"], new["label"], new["direction"], _size(new["nbytes"])
    times = new["seconds"]["median"] / old["seconds"]["median"]
    slower = new["seconds"]["min"] > old["seconds"]["max"]
    faster = new["seconds"]["max"] < old["seconds"]["min"]
    said = "slower" if slower else "faster" if faster else ""
    table.add_row(*words, f"{times:.3f}", f"{new['of_limit'] / old['of_limit']:.3f}", said)


def _show_details(console: Console, record: Record) -> None:
    """Print the details that are single figures; lists and tables stand in the record."""
    figures = {name: value for name, value in record.get("details", {}).items() if isinstance(value, int | float)}
    if figures:
        text = ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
        line = f"{record['label']} {record['direction']} {_size(record['nbytes'])}: {text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(records: list[Record], *, unit: str) -> Table:
    first = records[0]
    table = Table(title=f"{first['case']}: {first['backend']} on {_where(first)}, {unit}")
    for heading in ("label", "direction", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("xferlib", "min", "max", "limit", _share(unit)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peers", ratio=1)
    for record in records:
        table.add_row(*_row(record, unit))
    return table


def _share(unit: str) -> str:
    """Return what stands beside the limit: for a rate the share that is reached, for a time how many times as long it is."""
    return "of limit" if unit == "GB/s" else "x limit"


def _row(record: Record, unit: str) -> list[str]:
    moved = (2 if record["direction"] == "both" else 1) * record["nbytes"]

    def figure(seconds: float) -> str:
        return f"{moved / seconds / 1e9:.2f}" if unit == "GB/s" else f"{seconds * PER_SECOND[unit]:.2f}"

    seconds = record["seconds"]
    # The slowest transfer has the lowest rate.
    low, high = (seconds["max"], seconds["min"]) if unit == "GB/s" else (seconds["min"], seconds["max"])
    peers = ", ".join(f"{name} {figure(value)}" for name, value in record["peers_seconds"].items())
    return [
        record["label"],
        record["direction"],
        _size(record["nbytes"]),
        *(figure(value) for value in (seconds["median"], low, high)),
        figure(moved / record["limit_gbps"] / 1e9),
        f"{record['of_limit'] if unit == 'GB/s' else 1 / record['of_limit']:.3f}",
        peers or "-",
    ]


def _where(record: Record) -> str:
    machine = record["machine"]
    return machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]


def _size(nbytes: int) -> str:
    return next((f"{round(nbytes / unit)} {name}" for unit, name in UNITS if nbytes > 0.99 * unit), f"{nbytes} B")
