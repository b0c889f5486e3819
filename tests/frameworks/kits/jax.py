"""JAX, on whatever it computes on here. It gives its users no streams and no graphs: only what needs neither is asked of it."""

from __future__ import annotations

from typing import final

from xferlib_jax import conformance

from tests.frameworks.kits.kit import Kit

__all__ = ["JAX"]


@final
class JaxKit(Kit):
    name = "jax"
    hooks = conformance.TestJax
    whole_alias = "asarray"

    @property
    def bench(self) -> conformance.Bench:
        return conformance.bench()


JAX = JaxKit()
