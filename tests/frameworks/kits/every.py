"""The kits, and how a test is given them. A test that names none is run with each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.frameworks.kits.cupy import CUPY
from tests.frameworks.kits.jax import JAX
from tests.frameworks.kits.kit import CudaKit, Kit
from tests.frameworks.kits.numba import NUMBA

__all__ = ["CUDA_KITS", "KITS", "given", "pairs"]

CUDA_KITS: tuple[CudaKit, ...] = (CUPY, NUMBA)
KITS: tuple[Kit, ...] = (*CUDA_KITS, JAX)


def given(*kits: Kit) -> pytest.MarkDecorator:
    """Run a test with these kits only."""
    return pytest.mark.parametrize("kit", kits, ids=lambda kit: kit.name)


def pairs(argument: str, offers: Mapping[Any, Iterable[Callable[..., Any]]]) -> pytest.MarkDecorator:
    """Run a test with each kit and each function that is meant for it; `offers` is by kit."""
    return pytest.mark.parametrize(
        ("kit", argument),
        [pytest.param(kit, function, id=f"{kit.name}-{function.__name__}") for kit, each in offers.items() for function in each],
    )
