"""The cases, by name."""

from __future__ import annotations

from benchmarks.cases import (
    bystander,
    devices,
    drain,
    first_get,
    leaves,
    link,
    loaders,
    loading,
    locking,
    loop,
    memory_kinds,
    overhead,
    pageable,
    saving,
    sizes,
)

__all__ = ["CASES"]

MODULES = (
    link,
    overhead,
    loop,
    drain,
    pageable,
    sizes,
    leaves,
    loaders,
    memory_kinds,
    locking,
    first_get,
    saving,
    loading,
    devices,
    bystander,
)
CASES = {module.CASE.name: module.CASE for module in MODULES}
