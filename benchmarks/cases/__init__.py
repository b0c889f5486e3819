"""The cases, by name."""

from __future__ import annotations

from benchmarks.cases import bystander, drain, leaves, link, loaders, locking, loop, memory_kinds, overhead, pageable, sizes

__all__ = ["CASES"]

CASES = {
    case.name: case
    for case in (
        module.CASE for module in (link, overhead, loop, drain, pageable, sizes, leaves, loaders, memory_kinds, locking, bystander)
    )
}
