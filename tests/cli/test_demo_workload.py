"""The device work of every backend that is ready here, against the reference, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

import xferlib
from xferlib.cli.demo import reference
from xferlib.registry import workload_of
from xferlib.workload import EdgeSpec, Workload

if TYPE_CHECKING:
    import xferlib_cupy.workload
    import xferlib_host.workload
    import xferlib_jax.workload
    import xferlib_numba.workload

    # That the modules offer what the contract says is the type checker's to find.
    CONFORMING: tuple[Workload, ...] = (
        xferlib_host.workload,
        xferlib_cupy.workload,
        xferlib_numba.workload,
        xferlib_jax.workload,
    )

FRAMES = 3
SIZES = [(1, 1), (1, 9), (9, 1), (2, 2), (17, 33), (33, 64), (70, 67)]


@pytest.fixture(params=xferlib.backends())
def stager(request: pytest.FixtureRequest) -> Iterator[xferlib.Stager]:
    name = request.param
    try:
        opened = xferlib.stager(name)
    except xferlib.BackendUnavailableError as error:
        if name in os.environ.get("XFERLIB_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    with opened:
        yield opened


def batch(dtype: str, shape: tuple[int, ...], kind: str) -> npt.NDArray[Any]:
    random = np.random.default_rng(3)
    if kind == "flat":
        return np.full(shape, 7, dtype)
    if np.dtype(dtype).kind == "f":
        values = random.normal(0, 1, shape).astype(dtype)
        if kind == "wild":
            places = random.random(shape)
            values[places < 0.1] = np.nan
            values[places > 0.9] = np.inf
            values[(places > 0.5) & (places < 0.6)] = -np.finfo(dtype).max
            values[0] = np.nan
        return values
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("kind", ["plain", "flat", "wild"])
@pytest.mark.parametrize("channels", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32", "float64"])
def test_edges_equal_the_reference_bit_for_bit(stager: xferlib.Stager, dtype: str, channels: int | None, kind: str) -> None:
    for height, width in SIZES:
        spec = EdgeSpec(frames=FRAMES, height=height, width=width, channels=channels, dtype=np.dtype(dtype), slots=2)
        frames = batch(dtype, (FRAMES, *spec.frame_shape), kind)
        with workload_of(stager.name).edge_job(spec) as job:
            for slot, rounds, count in ((0, 0, FRAMES), (1, 3, FRAMES - 1)):
                result = job.launch(stager.put(frames[:count]).value, slot, rounds=rounds)
                found = stager.get(result).result()
                expected = [reference.edges(frame, rounds=rounds) for frame in frames[:count]]
                np.testing.assert_array_equal(found, expected, strict=True)


def test_results_of_different_slots_stand_side_by_side(stager: xferlib.Stager) -> None:
    spec = EdgeSpec(frames=1, height=40, width=50, channels=None, dtype=np.dtype(np.uint8), slots=2)
    first, second = (np.random.default_rng(seed).integers(0, 256, (1, 40, 50), np.uint8) for seed in (1, 2))
    with workload_of(stager.name).edge_job(spec) as job:
        results = [job.launch(stager.put(frames).value, slot, rounds=1) for slot, frames in enumerate((first, second))]
        job.synchronize()
        found = [stager.get(result).result() for result in results]
    for frames, edges in zip((first, second), found, strict=True):
        np.testing.assert_array_equal(edges[0], reference.edges(frames[0], rounds=1), strict=True)
