"""Transfers of JAX arrays that are interrupted anywhere: nothing stays held, nothing stays behind, and others work on."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")


from tests.interrupts.harness import COUNT, SEED
from tests.interrupts.transfers import OPERATIONS, interrupt


@pytest.mark.parametrize("name", OPERATIONS["jax"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_interrupted_leaves_nothing_held_and_nothing_behind(name: str) -> None:
    assert interrupt("jax", OPERATIONS["jax"][name], times=COUNT, seed=SEED, strikes=1, meanwhile="idle") == COUNT
