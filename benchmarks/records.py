"""What a benchmark leaves behind: records, one list of them per device in `results/`.

A record is one figure of xferlib beside the peers and the physical limit of the same run. Its key is what was measured, so a later
run replaces it. Rates are in GB/s (1e9 bytes a second), times in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, Protocol, TextIO, TypeAlias, TypedDict

from benchmarks.harness import Timing

__all__ = ["Key", "Record", "Run", "check", "forget", "key", "keys_of", "make", "merge", "read", "write"]


class Seconds(TypedDict):
    """Of one transfer: each of the `n` values is one call, or the mean of a sample of `batch` transfers."""

    median: float
    min: float
    max: float
    n: int


class Record(TypedDict):
    """`limit_gbps` is the bare runtime call; `of_limit` compares the two turn by turn, so it is steadier than their quotient."""

    case: str
    backend: str
    direction: str
    nbytes: int
    label: str
    batch: int
    seconds: Seconds
    gbps: float
    limit_gbps: float
    of_limit: float
    peers: dict[str, float]
    peers_seconds: dict[str, float]
    machine: dict[str, str]
    versions: dict[str, str]
    details: NotRequired[dict[str, Any]]
    """Figures of this case alone, as its docstring says."""


Key: TypeAlias = tuple[str, str, str, int, str]
TEXT = ("case", "backend", "direction", "label")
RATES = ("gbps", "limit_gbps", "of_limit")
TABLES: dict[str, type] = {"peers": float, "peers_seconds": float, "machine": str, "versions": str}
DIRECTIONS = ("h2d", "d2h", "both", "none")


class Run(Protocol):
    """Where and with what a record came about."""

    @property
    def machine(self) -> dict[str, str]: ...

    @property
    def versions(self) -> dict[str, str]: ...


def make(
    run: Run,
    *,
    case: str,
    backend: str,
    direction: str,
    nbytes: int,
    label: str,
    ours: Timing,
    limit: Timing,
    peers: Mapping[str, Timing] | None = None,
    details: dict[str, Any] | None = None,
) -> Record:
    """Return a record. `nbytes` is per direction; the rates of both at once count both."""
    moved = (2 if direction == "both" else 1) * nbytes
    rivals = peers or {}

    def gbps(timing: Timing) -> float:
        return round(moved / timing.median / 1e9, 6)

    record = Record(
        case=case,
        backend=backend,
        direction=direction,
        nbytes=nbytes,
        label=label,
        batch=ours.count,
        seconds=Seconds(median=ours.median, min=min(ours.values), max=max(ours.values), n=len(ours.values)),
        gbps=gbps(ours),
        limit_gbps=gbps(limit),
        of_limit=round(ours.share_of(limit), 4),
        peers={name: gbps(timing) for name, timing in rivals.items()},
        peers_seconds={name: timing.median for name, timing in rivals.items()},
        machine=run.machine,
        versions=run.versions,
    )
    if details is not None:
        record["details"] = details
    return record


def check(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless this is a record."""
    fields = set(Record.__annotations__)
    if set(record) | {"details"} != fields:
        raise ValueError(f"the fields of a record are {sorted(fields)!r}, not {sorted(record)!r}")
    wrong = [name for name in TEXT if not isinstance(record[name], str) or not record[name]]
    wrong += [name for name in ("nbytes", "batch") if not isinstance(record[name], int) or record[name] < 1]
    wrong += [name for name in RATES if not _positive(record[name])]
    wrong += [name for name, kind in TABLES.items() if not _table_of(record[name], kind)]
    if record["direction"] not in DIRECTIONS:
        wrong.append("direction")
    if not isinstance(record.get("details", {}), dict):
        wrong.append("details")
    if not _ordered(record["seconds"]):
        wrong.append("seconds")
    if wrong:
        raise ValueError(f"fields with a wrong value: { ({name: record[name] for name in wrong})!r}")


def merge(file: Path, records: Iterable[Record]) -> None:
    """Write the records into the file, in place of those of the same key, and keep the others."""
    _write(file, {key(record): record for record in read(file)} | _table(records))


def write(stream: TextIO, records: Iterable[Record]) -> None:
    """Write the records as `merge` leaves them in a file."""
    _dump(stream, _table(records))


def forget(file: Path, records: Iterable[Record]) -> None:
    """Take records out of the file: their run has turned out void."""
    void = {key(record) for record in records}
    if void:
        _write(file, {key(record): record for record in read(file) if key(record) not in void})


def keys_of(file: Path, run: Run) -> set[Key]:
    """Return the keys of the file's records of the same machine and the same versions."""
    return {key(one) for one in read(file) if (one["machine"], one["versions"]) == (run.machine, run.versions)}


def read(file: Path) -> list[Record]:
    """Return the records of a file; none of one that is not there. Raises `ValueError` for one that holds anything else."""
    if not file.exists():
        return []
    try:
        known = json.loads(file.read_text())
        if not isinstance(known, list) or not all(isinstance(one, dict) for one in known):
            raise ValueError("it is no list of records")
        for one in known:
            check(one)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected records, as --json writes them: {error}") from error
    return known


def _write(file: Path, table: Mapping[Key, Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Replaced in one step: a run that is stopped here leaves the old file.
    draft = file.with_name(f"{file.name}.new")
    with draft.open("w") as stream:
        _dump(stream, table)
    draft.replace(file)


def _table(records: Iterable[Record]) -> dict[Key, Record]:
    """Return the records by key; of several with one key, the last counts."""
    table: dict[Key, Record] = {}
    for record in records:
        check(record)
        table[key(record)] = record
    return table


def _dump(stream: TextIO, table: Mapping[Key, Record]) -> None:
    stream.write(json.dumps([table[one] for one in sorted(table)], indent=1) + "\n")


def key(record: Record) -> Key:
    """Return what was measured."""
    return record["case"], record["backend"], record["direction"], record["nbytes"], record["label"]


def _positive(value: object) -> bool:
    return isinstance(value, float) and value > 0


def _table_of(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(entry, kind) and bool(entry) for name, entry in value.items()
    )


def _ordered(seconds: object) -> bool:
    if not isinstance(seconds, dict) or set(seconds) != set(Seconds.__annotations__):
        return False
    times = [seconds[name] for name in ("min", "median", "max")]
    return all(_positive(time) for time in times) and sorted(times) == times and isinstance(seconds["n"], int) and seconds["n"] > 0
