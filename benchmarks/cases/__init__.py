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
    pageable,
    sizes,
    loop,
    drain,
    link,
    overhead,
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
"""In the order in which they are measured: what users have by default comes first. `pageable` asks for memory that nobody has
touched, which an allocator no longer gives once `sizes` has freed many arrays."""
CASES = {module.CASE.name: module.CASE for module in MODULES}
