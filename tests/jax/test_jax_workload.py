"""The device work of the JAX backend copies nothing between host and device: such copies stand in the way of those beside it."""

from __future__ import annotations

import numpy as np
import pytest

from xferlib.workload import EdgeSpec

jax = pytest.importorskip("jax")
workload = pytest.importorskip("xferlib_jax.workload")

SPEC = EdgeSpec(frames=2, height=16, width=24, channels=None, dtype=np.dtype(np.uint8), slots=1)


def test_a_launch_puts_nothing_on_the_device() -> None:
    frames = jax.device_put(np.zeros((2, *SPEC.frame_shape), np.uint8))
    with workload.edge_job(SPEC) as job, jax.transfer_guard("disallow"):
        job.launch(frames, 0, rounds=73)


def test_no_loop_asks_the_host_whether_it_goes_on() -> None:
    frames = jax.device_put(np.zeros((2, *SPEC.frame_shape), np.uint8))
    texts = [workload.blurred.lower(frames, rounds).compile().as_text() for rounds in workload.BLURS]
    texts += [workload.edges.lower(frames, rounds).compile().as_text() for rounds in range(workload.BLURS[-1])]
    loops = [line for text in texts for line in text.splitlines() if " while(" in line]
    assert loops
    assert [loop for loop in loops if "known_trip_count" not in loop] == []
