"""The cases, by name."""

from __future__ import annotations

from benchmarks.cases import link, overhead

__all__ = ["CASES"]

CASES = {case.name: case for case in (link.CASE, overhead.CASE)}
