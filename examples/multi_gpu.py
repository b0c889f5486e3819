"""Train one model on all GPUs of this machine: each gets its part of every batch, straight from pinned memory.

    python examples/multi_gpu.py
    python examples/multi_gpu.py --backend cpu --quick

`jax` takes the devices that JAX finds. `cpu` makes JAX see eight devices on the CPU, so the same program runs where there is no
GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import mean
from typing import Any

import jax
import model
import numpy as np
import xferlib_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiles import CLASSES, Tiles

DEVICES_OF_CPU = 8


def batches_of(tiles: Tiles, batch: int) -> Iterator[dict[str, Any]]:
    """Give every batch in new arrays."""
    for indices in tiles.ranges(batch):
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in tiles.spec(batch).items()}
        tiles.fill(indices, arrays)
        yield arrays


def main() -> None:
    """Train, and see the loss fall."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="jax", choices=["jax", "cpu"])
    arguments.add_argument("--quick", action="store_true", help="60 small batches")
    options = arguments.parse_args()
    if options.backend == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES_OF_CPU)
    devices = jax.local_devices()
    mesh = Mesh(np.array(devices), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    side, share, steps = (32, 64 // len(devices), 60) if options.quick else (64, 256, 200)
    batch = share * len(devices)

    step = jax.jit(model.step)
    state = jax.device_put(model.init(CLASSES), everywhere)
    losses = []
    with xferlib_jax.prefetch(batches_of(Tiles(batch * steps, side), batch), sharding=split, rewrites=False) as loop:
        for arrays in loop:
            assert arrays["image"].sharding.is_equivalent_to(split, arrays["image"].ndim)
            state, loss = step(state, arrays)
            losses.append(loss)
    before, after = mean(map(float, losses[:10])), mean(map(float, losses[-10:]))
    print(f"{len(losses)} batches of {batch} on {len(devices)} x {devices[0].device_kind}: loss {before:.2f} -> {after:.2f}")
    assert len(losses) == steps, "batches were lost"
    assert after < 0.8 * before, "the model did not learn"


if __name__ == "__main__":
    main()
