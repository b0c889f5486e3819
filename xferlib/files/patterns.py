"""Patterns of names, by which a caller says what is to become of which arrays: the first that fits counts.

A pattern that has no effect is a slip, and would change what is loaded in silence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

__all__ = ["check_patterns", "first_fit"]

T = TypeVar("T")

NEAREST = 3
"""Names in one error."""
COMPARED = 2000
"""Names of different kinds among which one is looked for that was meant: comparing takes a tenth of a millisecond each."""


def first_fit(rules: Mapping[str, T], name: str) -> T | None:
    """Return what the first pattern that fits a name says."""
    return next((value for pattern, value in rules.items() if fnmatchcase(name, pattern)), None)


def check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise `ValueError` for a pattern that has no effect on these names, and `TypeError` for what is no text.

    That is one that fits none of them, or only such as an earlier, wider one takes all of. One that is wider than those before it,
    such as a last "*", may be left without a name.
    """
    known = list(patterns)
    for pattern in known:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: {pattern!r} is no pattern of names: expected text, such as '*.bias'")
    idle = set(known if names else ())
    for name in names:
        if not idle:
            return
        idle.difference_update(next(([pattern] for pattern in known if fnmatchcase(name, pattern)), []))
    for index, pattern in enumerate(known):
        if pattern in idle:
            fits = set(_fitting(pattern, names))
            if not fits:
                raise ValueError(f"{argument}: none of the arrays has a name like {pattern!r}. {_advice(pattern, names)}")
            wider = next((earlier for earlier in known[:index] if _is_wider(earlier, pattern, fits, names)), None)
            if wider is not None:
                why = f"{pattern!r} comes behind {wider!r}, which fits all of its names, and the first that fits counts"
                raise ValueError(f"{argument}: {why}. Put it in front of that, or leave it out")


def _is_wider(earlier: str, pattern: str, fits: set[str], names: Sequence[str]) -> bool:
    """Tell whether an earlier pattern takes all that this one fits, and more, if not of these names then of others."""
    taken = set(_fitting(earlier, names))
    # Patterns are read as names here: "*.kernel" is one that "*" fits.
    return fits < taken or (fits == taken and fnmatchcase(pattern, earlier) and not fnmatchcase(earlier, pattern))


def _fitting(pattern: str, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if fnmatchcase(name, pattern))


def _advice(pattern: str, names: Sequence[str]) -> str:
    kinds: dict[str, str] = {}
    for name in names:
        # Layers have the same names but for their numbers.
        kinds.setdefault(re.sub(r"\d+", "0", name), name)
    literal = re.sub(r"[*?\[\]]", "", pattern)
    # What a star stands for says nothing of whether the rest is near.
    begins, ends = pattern.startswith("*"), pattern.endswith("*")
    part = slice(-len(literal), None) if begins and not ends else slice(len(literal)) if ends and not begins else slice(None)
    parts: dict[str, list[str]] = {}
    for name in list(kinds.values())[:COMPARED]:
        parts.setdefault(name[part], []).append(name)
    close = difflib.get_close_matches(literal, parts, n=NEAREST) or difflib.get_close_matches(literal, parts, n=NEAREST, cutoff=0.0)
    nearest = [name for found in close for name in parts[found]][:NEAREST]
    return f"The nearest names are {', '.join(map(repr, nearest))}. Mend the pattern, or leave it out"
