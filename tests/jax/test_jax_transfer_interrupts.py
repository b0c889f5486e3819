"""Transfers of JAX arrays that are interrupted anywhere: nothing stays held, nothing stays behind, and others work on."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

import xferlib_jax

import xferlib
from tests.interrupts import test_callbacks as callbacks
from tests.interrupts.conftest import earlier_objects_are_frozen  # noqa: F401  # A fixture for this file.
from tests.interrupts.harness import COUNT, SEED
from tests.interrupts.transfers import OPERATIONS, interrupt


@pytest.mark.parametrize("name", OPERATIONS["jax"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_interrupted_leaves_nothing_held_and_nothing_behind(name: str) -> None:
    assert interrupt("jax", OPERATIONS["jax"][name], times=COUNT, seed=SEED, strikes=1, meanwhile="idle") == COUNT


@pytest.mark.parametrize("operation", callbacks.OPERATIONS)
@pytest.mark.filterwarnings("ignore")
def test_no_function_of_ours_runs_where_an_interrupt_is_forgotten(operation: callbacks.Operation) -> None:
    with xferlib.stager("jax") as stager:
        # What is compiled or opened once is, by then.
        operation(stager)
        lost, count = callbacks.forgotten(lambda: operation(stager), xferlib_jax)
        assert lost == []
        assert count > 5
