"""What a run says about each law, in one line: passed, failed, or skipped and why. Counted from pytest's reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from xferlib.protocol import LAWS
from xferlib.words import counted

__all__ = ["verdicts"]

TEST = re.compile(r"::test_(?:law(\d+)|hook)_")
HOOKS = 0
"""The number that stands for the tests of the hooks, in the place of a law's."""
WORST_FIRST = ("failed", "error", "xfailed", "skipped", "passed")
"""The categories of pytest. A test may be in two of them: it has passed, but its teardown has not."""
PINNED = 9


def verdicts(stats: Mapping[str, Iterable[Any]], off: Collection[str]) -> list[str]:
    """Return the lines; none if no test of the suite was run. `stats`: reports by category. `off`: the flags that are off."""
    outcomes, reasons = _gather(stats)
    if not outcomes:
        return []
    lines = []
    for law in (HOOKS, *LAWS):
        if law in outcomes:
            title = LAWS[law] if law else "The hooks do what they say"
            notes = list(dict.fromkeys(reasons.get(law, ())))
            if law == PINNED and "pinned" in off:
                notes.append("pinned is off: all that is tested is that nothing claims it")
            name = f"law {law}" if law else "hooks"
            lines.append(f"{name:<7} {_outcome(Counter(outcomes[law].values())):<24} {'; '.join((title, *notes))}")
    missing = [str(law) for law in LAWS if law not in outcomes]
    if missing:
        lines.append(f"not run: law{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    return lines


def _gather(stats: Mapping[str, Iterable[Any]]) -> tuple[dict[int, dict[str, str]], dict[int, list[str]]]:
    """Return, by law, the category of each test, and why tests were skipped or are known to fail."""
    outcomes: dict[int, dict[str, str]] = {}
    reasons: dict[int, list[str]] = {}
    for category in WORST_FIRST:
        for report in stats.get(category, ()):
            found = TEST.search(getattr(report, "nodeid", ""))
            if found is None:
                continue
            law = int(found[1] or HOOKS)
            outcomes.setdefault(law, {}).setdefault(report.nodeid, category)
            if category == "skipped":
                reasons.setdefault(law, []).append(f"skipped: {_why_skipped(report)}")
            elif category == "xfailed":
                reasons.setdefault(law, []).append(f"known failure: {report.wasxfail}")
    return outcomes, reasons


def _outcome(count: Counter[str]) -> str:
    total, failed = count.total(), count["failed"] + count["error"]
    if failed:
        return f"FAILED  {failed} of {counted(total, 'test')}"
    if count["xfailed"]:
        return f"fails   {count['xfailed']} of {counted(total, 'test')}"
    if count["skipped"]:
        return f"skipped {count['skipped']} of {counted(total, 'test')}"
    return f"passed  {counted(total, 'test')}"


def _why_skipped(report: Any) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
