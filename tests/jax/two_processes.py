"""Run as `two_processes.py PORT NUMBER`: one of two JAX processes of two devices each, which make global arrays together."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

COUNT = 3
SHAPE = (16, 64, 600)


def globals_of(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, SHAPE, np.int32) for _ in range(COUNT)]


def check(mesh: Mesh, spec: Any, mine: Any) -> None:
    """Prefetch what `mine` says is this process's of each global array, and compare with NumPy and with JAX."""
    sharding = NamedSharding(mesh, spec)
    wholes = globals_of(7)
    add = jax.jit(lambda array: (array.sum(), array[3, 5, 7]))
    stagers = xferlib_jax.local_stagers()
    with xferlib_jax.prefetch((whole[mine] for whole in wholes), sharding, stagers=stagers) as loop:
        for whole, array in zip(wholes, loop, strict=True):
            assert array.shape == SHAPE, (array.shape, spec)
            assert array.sharding.is_equivalent_to(sharding, 3)
            total, item = add(array)
            assert (int(total), int(item)) == (int(whole.sum(dtype=np.int32)), int(whole[3, 5, 7])), spec
            expected = jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(whole[mine]))
            for ours, theirs in zip(array.addressable_shards, expected.addressable_shards, strict=True):
                assert ours.index == theirs.index
                assert ours.device == theirs.device
                assert np.array_equal(ours.data, theirs.data)
                assert np.array_equal(ours.data, whole[ours.index])
    pulled = sum(stager.stats().h2d_nbytes for stager in stagers)
    assert pulled == sum(whole[mine].nbytes for whole in wholes), (pulled, spec)
    for stager in stagers:
        stager.close()


def check_load(mesh: Mesh, spec: Any, nbytes: int) -> None:
    """Load a file that both processes see. `nbytes`: so many of it does this process need."""
    sharding = NamedSharding(mesh, spec)
    whole = globals_of(9)[0]
    stagers = xferlib_jax.local_stagers()
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "a.npy"), whole)
        array = xferlib_jax.load(Path(folder, "a.npy"), sharding, dtype=np.int16, stagers=stagers)
        array = xferlib_jax.load(Path(folder, "a.npy"), sharding, stagers=stagers)
    assert array.shape == SHAPE
    assert array.sharding.is_equivalent_to(sharding, 3)
    for shard in array.addressable_shards:
        assert np.array_equal(shard.data, whole[shard.index]), spec
    pulled = sum(stager.stats().h2d_nbytes for stager in stagers)
    assert pulled == 2 * nbytes, (pulled, spec)
    for stager in stagers:
        stager.close()


def check_save(mesh: Mesh, spec: Any, *, whole: bool) -> None:
    """Save an array of which this process has the whole, or be told that it has not."""
    expected = globals_of(11)[0]
    array = jax.make_array_from_callback(SHAPE, NamedSharding(mesh, spec), expected.__getitem__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.npy")
        if whole:
            assert np.array_equal(np.load(xferlib_jax.save(path, array).result(60)), expected), spec
        else:
            with pytest.raises(ValueError, match=rf"process {jax.process_index()} cannot read them.*process_allgather"):
                xferlib_jax.save(path, array)


def check_all() -> None:
    me = jax.process_index()
    # Each row is a process.
    devices = np.array(jax.devices()).reshape(2, 2)
    by_process = Mesh(devices, ("process", "device"))
    half, everything = slice(8 * me, 8 * me + 8), slice(None)
    check(by_process, PartitionSpec(("process", "device")), half)
    # The same for both devices of a process: each pulls a half.
    check(by_process, PartitionSpec("process"), half)
    check(by_process, PartitionSpec("process", "device"), half)
    check(by_process, PartitionSpec("device"), everything)
    check(by_process, PartitionSpec(), everything)
    check(by_process, PartitionSpec(None, "process"), (everything, slice(32 * me, 32 * me + 32)))
    # The devices of a process are not side by side: its data is, in the order of their places.
    rows = np.concatenate([np.arange(4) + 4 * me, np.arange(4) + 8 + 4 * me])
    check(Mesh(devices.T, ("device", "process")), PartitionSpec(("device", "process")), rows)

    total = globals_of(9)[0].nbytes
    check_load(by_process, PartitionSpec(("process", "device")), total // 2)
    check_load(by_process, PartitionSpec("process"), total // 2)
    check_load(by_process, PartitionSpec("device"), total)
    check_load(by_process, PartitionSpec(None, "process"), total // 2)

    for spec in (PartitionSpec("device"), PartitionSpec(), PartitionSpec(None, "device")):
        check_save(by_process, spec, whole=True)
    for spec in (PartitionSpec("process"), PartitionSpec("device", "process")):
        check_save(by_process, spec, whole=False)
    xferlib_jax.close()

    uneven = NamedSharding(Mesh(devices.ravel()[:3], ("x",)), PartitionSpec("x"))
    with pytest.raises(ValueError, match="cannot be told from the data of one"):
        next(xferlib_jax.prefetch([np.zeros((6, 2), np.float32)], uneven))
    others = NamedSharding(Mesh(devices[1 - me], ("x",)), PartitionSpec("x"))
    with pytest.raises(ValueError, match=f"none of the devices of .* is process {me}'s"):
        xferlib_jax.prefetch([], others)


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
    check_all()
    print("all right")
