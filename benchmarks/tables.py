"""Write the figures of README.md and docs/numbers.md from the records in `results/`: `python -m benchmarks.tables --write`.

A table stands in a page between `<!-- table: NAME -->` and `<!-- end of table -->`; this module writes what is between them. The
same command draws the pictures of the case `sizes` in docs/. Without `--write` it says what differs, and changes nothing.

It does not write what no record tells: figures in the text of a page say where they come from.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks import plot
from benchmarks.records import Key, Record, key, read

__all__ = ["PAGES", "PICTURES", "TABLES", "Results", "filled", "main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3.json"
"""All figures are one machine's, so that those of different rows can be compared."""
PAGES = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
PICTURES = {"cupy": ROOT / "docs" / "sizes-cupy.svg", "jax": ROOT / "docs" / "sizes-jax.svg"}
"""By backend."""
MARKED = re.compile(r"(?<=<!-- table: )(\w+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL)
NOT_MEASURED = "not measured"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Table: TypeAlias = Sequence[Sequence[str]]
"""Rows of cells; the first one is the heading."""


class Results:
    """The records of one machine, by what was measured."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records: dict[Key, Record] = {key(one): one for one in records}

    def one(self, case: str, backend: str, direction: str, nbytes: int, label: str) -> Record:
        """Return a record. Raises `KeyError`, with what was asked for, where nobody has measured it."""
        return self._records[case, backend, direction, nbytes, label]

    def find(self, case: str, backend: str, direction: str, nbytes: int, label: str) -> Record | None:
        """Return a record, if it was measured: a brief run may end before it comes to the last rows of a case."""
        return self._records.get((case, backend, direction, nbytes, label))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status: 1 where something differs and was not written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="The figures on the pages, from the records.")
    parser.add_argument("--write", action="store_true", help="change the pages and draw the pictures; else say what differs")
    write = parser.parse_args(arguments).write
    differs = False
    for page in PAGES:
        old = page.read_text()
        new = filled(old)
        if write:
            page.write_text(new)
        differs |= new != old
        if new != old and not write:
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(page), "the records"))
    for backend, picture in PICTURES.items():
        records = drawn(backend)
        if plot.is_of(picture, records):
            continue
        differs = True
        if write:
            plot.draw(records, picture)
        else:
            print(f"{picture} is not of the records that there are")
    return 1 if differs and not write else 0


def filled(page: str) -> str:
    """Return the text of a page with its tables filled from the records. Raises `KeyError` for a name that is no table's."""
    results = Results(read(RESULTS))
    return MARKED.sub(lambda marked: f"{marked[1]}{marked[2]}{_markdown(TABLES[marked[1]](results))}", page)


def drawn(backend: str) -> list[Record]:
    """Return the records for a backend's picture: those of everything that was measured at more than one size."""
    records = [one for one in read(RESULTS) if (one["case"], one["backend"]) == ("sizes", backend)]
    ways = [(one["direction"], one["label"]) for one in records]
    return [one for one, way in zip(records, ways, strict=True) if ways.count(way) > 1]


def _markdown(table: Table) -> str:
    heading, *rows = table
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (heading, *rows)]
    lines.insert(1, "|" + "---|" * len(heading))
    return "\n".join(lines) + "\n"


# How a figure is written.


def us(seconds: float) -> str:
    """In microseconds, with a decimal where that says something."""
    return f"{seconds * 1e6:.1f}" if seconds < 10e-6 else f"{seconds * 1e6:.0f}"


def ms(seconds: float) -> str:
    """In milliseconds, to three digits."""
    return digits(seconds * 1e3)


def digits(value: float) -> str:
    """To three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def short(value: float) -> str:
    """To two digits, and to three below 2: large ratios are given roughly."""
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def rate(gbps: float) -> str:
    """In whole GB/s, with a decimal where that says something."""
    return f"{gbps:.1f}" if gbps < 9.95 else f"{gbps:.0f}"


def over_bound(record: Record) -> float:
    """How many times as long as the longer of compute and copy a step took: the median over the rounds."""
    return float(record["details"]["over_bound"])


def peer_over_bound(record: Record, peer: str) -> float:
    """Likewise for a peer: its median step over the longer of compute and copy."""
    bound: float = max(record["details"]["compute_seconds"], record["details"]["copy_seconds"])
    return record["peers_seconds"][peer] / bound


def both(write: Callable[[float], str], values: Sequence[float], between: str = ", ") -> str:
    """Return several figures in one cell."""
    return between.join(write(value) for value in values)


# The tables.


def loops(results: Results) -> Table:
    sizes = 16 * MIB, 64 * MIB, 256 * MIB

    def row(words: str, backend: str, direction: str, label: str) -> list[str]:
        cells = [words]
        for nbytes in sizes:
            record = results.find("sizes", backend, direction, nbytes, label)
            if record is None:
                cells.append(NOT_MEASURED)
                continue
            limit = nbytes / record["limit_gbps"] / 1e9
            peer, seconds = min(record["peers_seconds"].items(), key=lambda item: item[1])
            cells.append(f"{1 / record['of_limit']:.2f}; {short(seconds / limit)} {peer}")
        return cells

    return [
        [
            "pageable memory, default arguments: step over the bare copy of pinned memory; the best peer",
            "16 MiB",
            "64 MiB",
            "256 MiB",
        ],
        *(
            row(f"{name}: {words}", backend, direction, label)
            for name, backend in (("CuPy", "cupy"), ("JAX", "jax"))
            for words, direction, label in (
                ("`prefetch(batches, stager)`, arrays that the source keeps", "h2d", "loop, kept by the source"),
                ("the same, each array made anew", "h2d", "loop, made anew"),
                ("`prefetch(batches, stager, rewrites=False)`", "h2d", "loop, rewrites=False"),
                ("`drain(results, stager)`", "d2h", "loop"),
            )
        ),
    ]


def steps(results: Results) -> Table:
    sizes = 256 * MIB, 64 * MIB

    def row(words: str, peers: Mapping[str, str], *what: str) -> list[str]:
        case, backend, direction, label = what
        records = [results.one(case, backend, direction, nbytes, label) for nbytes in sizes]
        others = [f"{name} {both(short, [peer_over_bound(one, peer) for one in records])}" for peer, name in peers.items()]
        return [words, *(f"{over_bound(one):.2f}" for one in records), "; ".join(others)]

    return [
        [
            "pinned memory: step over the longer of compute and copy; 1.00 is the limit",
            "256 MiB",
            "64 MiB",
            "as it is done otherwise",
        ],
        row(
            "JAX loop, the next batch put after the step is launched",
            {"jax device_put": "`device_put` from pinned memory:"},
            *("loop", "jax", "h2d", "in order"),
        ),
        row(
            "JAX, each step's output to the host",
            {"np.asarray": "`np.asarray`", "copy_to_host_async": "`copy_to_host_async`"},
            *("drain", "jax", "d2h", "in order"),
        ),
        row(
            "CuPy loop, the next batch put after the step is launched",
            {"cupy set(stream)": "CuPy's `set(stream)`"},
            *("loop", "cupy", "h2d", "default stream"),
        ),
        row(
            "CuPy, each step's output to the host",
            {"cupy get(stream, out)": "CuPy's `get(stream, out)`"},
            *("drain", "cupy", "d2h", "default stream"),
        ),
    ]


def loaders(results: Results) -> Table:
    def written(label: str, write: Callable[[Record], str]) -> str:
        found = [results.find("loaders", "jax", "h2d", nbytes, f"transfer-bound, {label}") for nbytes in (256 * MIB, 64 * MIB)]
        return " / ".join(NOT_MEASURED if one is None else write(one) for one in found)

    def ours(words: str, label: str) -> list[str]:
        return [
            words,
            written(label, lambda one: ms(one["seconds"]["median"])),
            written(label, lambda one: digits(over_bound(one))),
        ]

    def theirs(words: str, peer: str) -> list[str]:
        return [
            words,
            # All of ours stand beside the same peers.
            written("pageable", lambda one: ms(one["peers_seconds"][peer])),
            written("pageable", lambda one: digits(peer_over_bound(one, peer))),
        ]

    alone = written("4 workers", lambda one: ms(one["details"]["writers_seconds"]))
    return [
        ["ms a step, 256 / 64 MiB, batches that are there already, transfer-bound", "", "over compute and copy"],
        ours("`xferlib.prefetch` from pinned slots", "pinned slots"),
        ours("`xferlib.prefetch` from pageable memory", "pageable"),
        ours(f"`SharedRing`, four workers that copy every batch anew (alone: {alone})", "4 workers"),
        theirs("torch `DataLoader`, four workers, pinned; tensors in shared memory beforehand", "torch DataLoader, shared tensors"),
        theirs("Flax `prefetch_to_device`", "flax prefetch_to_device"),
    ]


def pageable(results: Results) -> Table:
    bare = ["cuMemcpy"]
    to_device = [bare, ["cupy set", "cupy asarray"], ["torch to"], ["numba copy_to_device"], ["jax device_put"]]
    to_host = [bare, ["cupy get(out=)", "cupy asnumpy"], ["torch copy_", "torch cpu"], ["numba copy_to_host"], ["np.asarray"]]

    def row(words: str, backend: str, direction: str, label: str) -> list[str]:
        record = results.one("pageable", backend, direction, GIB, label)

        def peers(names: Sequence[str]) -> str:
            figures = [record["peers"][name] for name in names if name in record["peers"]]
            return " to ".join(dict.fromkeys(rate(end) for end in (min(figures), max(figures)))) if figures else ""

        columns = to_device if direction == "h2d" else to_host
        return [words, f"{record['gbps']:.1f} of {record['limit_gbps']:.1f}", *map(peers, columns)]

    return [
        ["GB/s, 1 GiB of pageable memory", "xferlib, of pinned", "bare `cudaMemcpy`", "CuPy", "torch", "Numba", "JAX"],
        row("host to device, CuPy", "cupy", "h2d", "touched"),
        row("the same, JAX", "jax", "h2d", "touched"),
        row("device to host, touched memory, CuPy", "cupy", "d2h", "touched"),
        row("the same, JAX", "jax", "d2h", "touched"),
        row("device to host, memory never touched before, CuPy", "cupy", "d2h", "untouched"),
        row("the same, JAX", "jax", "d2h", "untouched"),
    ]


def calls(results: Results) -> Table:
    sizes = 64 * KIB, MIB, 16 * MIB, 64 * MIB

    def rows(words: str, direction: str, label: str) -> list[list[str]]:
        ours, best = [words], ["best peer"]
        for nbytes in sizes:
            record = results.find("sizes", "cupy", direction, nbytes, label)
            if record is None:
                ours.append(NOT_MEASURED)
                best.append("")
                continue
            peer, seconds = min(record["peers_seconds"].items(), key=lambda item: item[1])
            mine = record["seconds"]["median"]
            ours.append(f"**{us(mine)}**" if mine < seconds else us(mine))
            best.append(f"{f'**{us(seconds)}**' if seconds <= mine else us(seconds)} {peer}")
        return [ours, best]

    puts = [results.find("sizes", "cupy", "h2d", nbytes, "call") for nbytes in sizes]
    return [
        ["us, default arguments, CuPy", "64 KiB", "1 MiB", "16 MiB", "64 MiB"],
        *rows("`put(array)`, pageable", "h2d", "call"),
        ["`cupy.asarray`", *("" if one is None else us(one["peers_seconds"]["cupy asarray"]) for one in puts)],
        *rows("`get(array).result()`", "d2h", "call"),
        *rows("`get(array, out=pageable)`", "d2h", "call, out="),
    ]


def leaves(results: Results) -> Table:
    def of(backend: str) -> list[Record]:
        return [results.one("leaves", backend, "h2d", 500 * each, "500 leaves") for each in (64 * KIB, 4 * KIB)]

    def ours(words: str, backend: str) -> list[str]:
        return [words, *(f"{one['seconds']['median'] * 1e3:.1f}" for one in of(backend))]

    def theirs(words: str, backend: str, peer: str) -> list[str]:
        return [words, *(f"{one['peers_seconds'][peer] * 1e3:.1f}" for one in of(backend))]

    return [
        ["ms, 500 arrays in one tree", "64 KiB each", "4 KiB each"],
        ours("xferlib to CuPy", "cupy"),
        theirs("CuPy, one by one", "cupy", "cupy asarray"),
        theirs("torch, one by one from its own pinned memory", "cupy", "torch to"),
        ours("xferlib to JAX", "jax"),
        theirs("`device_put` of the tree", "jax", "jax device_put"),
    ]


def pinned(results: Results) -> Table:
    def row(words: str, direction: str, cupy: str) -> list[str]:
        records = [results.one("link", "cupy", direction, nbytes, "pinned") for nbytes in (64 * MIB, GIB)]
        columns = [[one["gbps"] for one in records], [one["limit_gbps"] for one in records]]
        columns += [[one["peers"][peer] for one in records] for peer in (cupy, "torch copy_")]
        return [words, *(" / ".join(f"{figure:.1f}" for figure in column) for column in columns)]

    return [
        ["GB/s, 64 MiB / 1 GiB, CuPy", "xferlib", "bare copy", "CuPy", "torch"],
        row("`put(into=)`, host to device", "h2d", "cupy set"),
        row("`get(out=)`, device to host", "d2h", "cupy get(out=)"),
        row("both at once", "both", "cupy set + cupy get(out=)"),
    ]


def first_get(results: Results) -> Table:
    def row(words: str, backend: str) -> list[str]:
        record = results.one("first_get", backend, "d2h", 300 * ((4 * GIB) // 300 // 256 * 256), "300 arrays")
        details = record["details"]
        again = record["nbytes"] / record["limit_gbps"] / 1e9
        calls = [digits(details[name]) for name in ("first_ms", "second_ms")]
        steps = both(us, [details[f"{name}_longest_us"] / 1e6 for name in ("quiet_step", "step_beside")], " / ")
        return [words, calls[0], ms(record["seconds"]["median"]), calls[1], ms(again), steps]

    return [
        [
            "ms, 4 GiB in 300 arrays to the host",
            *("first: the call", "all there", "again: the call", "all there"),
            "longest step of another thread, us: quiet / beside the first",
        ],
        row("CuPy", "cupy"),
        row("JAX", "jax"),
    ]


def saving(results: Results) -> Table:
    def row(words: str, backend: str) -> list[str]:
        record = results.one("saving", backend, "d2h", 300 * ((4 * GIB) // 300 // 256 * 256), "300 arrays")
        details = record["details"]
        steps = [details[f"{name}_median_us"] / 1e6 for name in ("quiet_step", "step_beside_save", "step_beside_peer")]
        return [
            words,
            digits(details["call_ms"]),
            ms(record["seconds"]["median"]),
            ms(record["peers_seconds"]["get, then safetensors"]),
            ms(record["peers_seconds"]["torch.save"]),
            ms(record["nbytes"] / record["limit_gbps"] / 1e9),
            both(us, steps, " / "),
        ]

    return [
        [
            "ms, 4 GiB in 300 arrays to a file in memory",
            *("`save`: the call", "the file is there", "`get`, then safetensors", "`torch.save`", "threads that only write"),
            "median step of another thread, us: quiet / beside `save` / beside `get`",
        ],
        row("CuPy", "cupy"),
        row("JAX", "jax"),
    ]


def overhead(results: Results) -> Table:
    def figures(records: Sequence[Record], peer: str | None) -> str:
        return both(us, [one["seconds"]["median"] if peer is None else one["peers_seconds"][peer] for one in records], " / ")

    into = [results.one("overhead", "cupy", "h2d", 64, "put(into=)")]
    value = [results.one("overhead", "jax", "h2d", 64, f"put().value{busy}") for busy in ("", ", busy")]
    return [
        ["us a call, 64 bytes", "xferlib", "bare copy", "the framework's own"],
        [
            "CuPy, `put(into=)` an existing array",
            figures(into, None),
            figures(into, "memcpyAsync"),
            f"`set` {figures(into, 'cupy set')}",
        ],
        [
            "JAX, `put().value` alone / beside compute",
            figures(value, None),
            figures(value, "cuMemcpyAsync"),
            f"`device_put` {figures(value, 'jax device_put')}",
        ],
    ]


def bystander(results: Results) -> Table:
    turns, interval = ("quiet", "pinned", "staging"), ", switch interval 1 ms"

    def row(words: str, label: str) -> list[str]:
        details = results.one("bystander", "cupy", "h2d", 256 * MIB, label)["details"]
        medians = [details[f"{turn}_median_us"] / 1e6 for turn in turns]
        tails = [details[f"{turn}_p99_over_median"] for turn in turns]
        rates = [details[f"{turn}_gbps"] for turn in turns[1:]]
        return [words, *(both(write, of, " / ") for write, of in ((ms, medians), (digits, tails), (rate, rates)))]

    training, python = "training step beside staging", "Python step beside staging"
    return [
        [
            "step of another thread: alone / beside pinned / beside pageable batches",
            *("median, ms", "99th percentile over median", "GB/s: pinned / pageable"),
        ],
        row("training, 170 launches and little Python", training),
        row("the same, switch interval of 1 ms", training + interval),
        row("nothing but Python", python),
        row("the same, switch interval of 1 ms", python + interval),
    ]


TABLES: Mapping[str, Callable[[Results], Table]] = {
    table.__name__: table
    for table in (loops, steps, loaders, pageable, calls, leaves, pinned, first_get, saving, overhead, bystander)
}

if __name__ == "__main__":
    sys.exit(main())
