"""The cases, by name."""

from __future__ import annotations

from benchmarks.cases import (
    bystander,
    drain,
    first_get,
    leaves,
    link,
    loaders,
    locking,
    loop,
    memory_kinds,
    overhead,
    pageable,
    sizes,
)

__all__ = ["CASES"]

MODULES = (link, overhead, loop, drain, pageable, sizes, leaves, loaders, memory_kinds, locking, first_get, bystander)
CASES = {module.CASE.name: module.CASE for module in MODULES}
