"""What `measure_overlap` found, as values, as a table, and in words. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, final

from xferlib.words import in_words

__all__ = ["OverlapReport", "OverlapRow", "RowDirection", "Spread"]

RowDirection: TypeAlias = Literal["h2d", "d2h", "both"]
RowVerdict: TypeAlias = Literal["overlaps", "in part", "one order only", "does not overlap", "cannot tell", "a CPU cannot tell"]

HIDDEN, SHOWN = 0.8, 0.25
"""Shares from which on a copy counts as hidden, and up to which it does not."""
WIDE = 0.3
"""Between the quartiles of the shares of several rounds: with more than this nothing can be said."""
HOLDS = 0.5
"""Share of the copy's time from which on its call counts as one that keeps its caller."""
ON_A_CPU = (
    "this is a CPU: its cores make the copies and the compute, so how much of a copy is hidden tells whether a core was free, not "
    "whether the program overlaps. Order and starting without waiting can be tested here (xferlib conformance); overlap needs a GPU"
)


@final
@dataclass(frozen=True)
class Spread:
    """What several rounds gave.

    Attributes:
        median: In the middle of them.
        least: The smallest.
        greatest: The largest.
        lower: The lower quartile.
        upper: The upper quartile.
    """

    median: float
    least: float
    greatest: float
    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return that of at least one sample."""
        ordered = sorted(samples)
        least, lower, middle, upper, greatest = (_at(ordered, quarter) for quarter in range(5))
        return cls(middle, least, greatest, lower, upper)

    @property
    def width(self) -> float:
        """How far the middle half of the samples lies apart. One sample of five or more, wherever it lies, does not count."""
        return self.upper - self.lower

    def percent(self) -> str:
        """Return the shares for people, as median, quartiles, least and greatest: "97 % (95 to 98; 12 to 99)"."""
        shares = (self.median, self.lower, self.upper, self.least, self.greatest)
        # The sum makes 0 of what would be shown as -0.
        middle, lower, upper, least, greatest = (round(share * 100) + 0 for share in shares)
        return f"{middle} % ({lower} to {upper}; {least} to {greatest})"


@final
@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """One way to copy, beside compute that takes longer.

    Attributes:
        call: "xferlib", with what matters of its arguments behind a comma, or the framework's own call.
        direction: To the device, to the host, or one of each at once.
        copy_seconds: The copy alone; with "both", the two at once.
        compute_seconds: The compute alone.
        call_seconds: How long the call kept its caller, without compute.
        copy_first: Share of `copy_seconds` that was hidden where the copy was enqueued before compute.
        compute_first: The same where it was enqueued after.
        on_gpu: Whether this was on a GPU: elsewhere the verdict says that nothing can be said.
        why: Why this way may not overlap, and what to do; "": nothing is known.
    """

    call: str
    direction: RowDirection
    copy_seconds: Spread
    compute_seconds: Spread
    call_seconds: Spread
    copy_first: Spread
    compute_first: Spread
    on_gpu: bool
    why: str

    @property
    def keeps_caller(self) -> bool:
        """Whether the call kept its caller for most of the copy."""
        return self.call_seconds.median > HOLDS * self.copy_seconds.median

    @property
    def verdict(self) -> RowVerdict:
        """Say whether it overlaps, from the medians; only where the middle half of the rounds agrees."""
        if not self.on_gpu:
            return "a CPU cannot tell"
        orders = (self.copy_first, self.compute_first)
        # Of a copy that takes longer than the compute, no more than that could be hidden.
        if any(order.width > WIDE for order in orders) or self.compute_seconds.median < HIDDEN * self.copy_seconds.median:
            return "cannot tell"
        hidden, shown = ([test(order.median) for order in orders] for test in (HIDDEN.__le__, SHOWN.__ge__))
        if all(hidden):
            return "overlaps"
        if all(shown):
            return "does not overlap"
        return "one order only" if any(hidden) and any(shown) else "in part"

    @property
    def words(self) -> str:
        """Return the verdict as a sentence."""
        way = f"{self.call}, {_DIRECTIONS[self.direction]}"
        figures = f"copy enqueued first {self.copy_first.percent()}, compute first {self.compute_first.percent()} hidden"
        if self.verdict == "one order only":
            order = "before" if self.copy_first.median >= HIDDEN else "after"
            said = f"{way}: overlaps only if it is enqueued {order} the compute ({figures})"
        else:
            said = f"{way}: {self.verdict} ({figures})"
        if self.on_gpu and self.keeps_caller:
            said += f"; the call keeps its caller {self.call_seconds.median * 1e3:.1f} ms of {self.copy_seconds.median * 1e3:.1f}"
        return f"{said}. {self.why}" if self.why and self.on_gpu and self.verdict != "overlaps" else said


@final
@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """What `measure_overlap` returns. `str()` of it is a table with the verdicts below, for people.

    Attributes:
        backend: The stager's name.
        device: The device in words.
        on_gpu: Whether that is a GPU.
        nbytes: Of one copy.
        rows: The ways to copy, xferlib's first.
    """

    backend: str
    device: str
    on_gpu: bool
    nbytes: int
    rows: tuple[OverlapRow, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Return the verdicts, one for each row; on a CPU what a CPU can show."""
        return tuple(row.words for row in self.rows) if self.on_gpu else (ON_A_CPU,)

    def to_json(self) -> str:
        """Return the report as a JSON object: the attributes, with a verdict in each row, and the words."""
        rows: list[dict[str, Any]] = [asdict(row) | {"verdict": row.verdict, "words": row.words} for row in self.rows]
        return json.dumps(asdict(self) | {"rows": rows, "words": self.words}, indent=2)

    def __str__(self) -> str:
        head = ("copied by", "", "copy", "compute", "call", "copy first", "compute first", "verdict")
        # A CPU's shares tell nothing of overlap: whoever wants them all the same has the rows.
        columns = len(head) if self.on_gpu else head.index("copy first")
        lines = [line[:columns] for line in (head, *(_cells(row) for row in self.rows))]
        widths = [max(len(line[column]) for line in lines) for column in range(columns)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        title = f"{self.backend} on {self.device}: copies of {in_words(self.nbytes)}"
        if not self.on_gpu:
            return "\n".join([f"{title} and compute, each alone", "", *self.words, "", *table])
        title += " beside compute; share of the copy that was hidden, as median (quartiles; least to greatest)"
        return "\n".join([title, "", *table, "", *self.words])


def _at(ordered: Sequence[float], quarter: int) -> float:
    """Return the value a number of quarters into the samples, between the two next to it."""
    whole, rest = divmod(quarter * (len(ordered) - 1), 4)
    below, above = ordered[whole], ordered[min(whole + 1, len(ordered) - 1)]
    # Rounded, it may come to lie beyond them.
    return min(max(below + (above - below) * rest / 4, below), above)


def _cells(row: OverlapRow) -> tuple[str, ...]:
    times = (f"{spread.median * 1e3:.2f} ms" for spread in (row.copy_seconds, row.compute_seconds, row.call_seconds))
    return (row.call, _SHORT[row.direction], *times, row.copy_first.percent(), row.compute_first.percent(), row.verdict)


_DIRECTIONS = {"h2d": "host to device", "d2h": "device to host", "both": "both directions at once"}
_SHORT = {"h2d": "H2D", "d2h": "D2H", "both": "both"}
