"""The mutants of the host backend as tests, not run with the others: `pytest tests/mutants/laws/host.py` shows how each fails."""

from __future__ import annotations

from tests.mutants.laws import (
    host_copies,
    host_failures,
    host_hooks,
    host_mapped,
    host_memory,
    host_ownership,
    host_values,
    host_waits,
)
from tests.mutants.laws.broken import MUTANTS, honest

__all__ = ["HONEST", "MODULES"]

MODULES = (host_copies, host_failures, host_hooks, host_mapped, host_memory, host_ownership, host_values, host_waits)

HONEST = honest(MUTANTS)

for _name, _mutant in {**MUTANTS, **HONEST}.items():
    globals()[_name] = _mutant.make_tests(_name)
