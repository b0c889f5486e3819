"""XLA captures CUDA graphs of its own (command buffers): nothing that a stager does beside them invalidates one."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import children
from tests.jax.command_buffers import STEPS, Outcome, main
from xferlib.stager import Stager

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "--xla_gpu_graph_min_graph_size=1",
    # What cuBLAS enqueues can be had only by capturing it; kernels of XLA's own become nodes without.
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_dump_hlo_as_text",
)
PLAN = re.compile(r"kCommandBuffer|command_buffer")
LIMIT_SECONDS = 110.0


def test_captures_of_xla_survive_transfers_and_polls_beside_them(stager: Stager, tmp_path: Path) -> None:
    if not stager.on_gpu:
        pytest.skip("XLA has command buffers on a GPU only")
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS, f"--xla_dump_to={tmp_path}"))
    child = children.run(
        [sys.executable, "-m", "tests.jax.command_buffers"],
        cwd=ROOT,
        # This process holds most of the memory.
        env=os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"},
        seconds=LIMIT_SECONDS,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    outcome = Outcome(**json.loads(child.stdout.splitlines()[-1]))
    # Shown if the test fails, or if it is asked for.
    print(outcome)
    assert (outcome.wrong, outcome.failures) == (0, []), child.stderr
    assert outcome.transfers > 0
    assert outcome.polls > 0
    if outcome.launches is None or outcome.captures is None:
        assert planned(tmp_path), "CUPTI cannot count here, and no dump of XLA's has a command buffer: this tests nothing"
        return
    # The first ones may be run without, to warm up.
    assert outcome.launches >= 0.9 * STEPS, "XLA has not run the steps as graphs: this tests nothing"
    assert outcome.captures > 0, "XLA has captured nothing: this tests nothing"


def test_the_program_comes_out_right_without_graphs(stager: Stager) -> None:
    """On whatever JAX computes on here: the same threads, beside steps of another kind."""
    outcome = main(steps=50)
    assert (outcome.wrong, outcome.failures) == (0, [])


def planned(dumps: Path) -> bool:
    """Tell whether a program that XLA dumped has a command buffer. Its options, which it dumps as well, always name them."""
    programs = [*dumps.glob("*thunk*"), *dumps.glob("*after_optimizations*.txt")]
    return any(PLAN.search(program.read_text(errors="replace")) for program in programs)
