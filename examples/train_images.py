"""Train a small JAX model on images from any loader, with the copies behind the compute.

    python examples/train_images.py --quick
    python examples/train_images.py --loader workers

Each image is a square cut from a photograph; the model learns to say from which quarter of the photograph's height it comes. With
JAX for CUDA installed, the same command trains on the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import mean
from typing import Any

from loaders import LOADERS
from tiles import CLASSES, Tiles

import xferlib


def train(batches: Iterable[Any]) -> list[float]:
    """Return the loss of every batch."""
    # Not at the top: spawned worker processes import this file, and do not need JAX.
    import jax
    import model

    step = jax.jit(model.step)
    state = model.init(CLASSES)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    # Only now, so that the host did not wait in the loop.
    return [float(loss) for loss in losses]


def main() -> None:
    """Train, and see the loss fall."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="jax", help="jax, or host for what JAX then copies itself")
    arguments.add_argument("--loader", default="in-place", choices=LOADERS)
    arguments.add_argument("--quick", action="store_true", help="60 small batches")
    options = arguments.parse_args()
    side, batch, steps = (32, 64, 60) if options.quick else (64, 256, 200)
    tiles = Tiles(batch * steps, side)
    with xferlib.stager(options.backend) as stager:
        batches = LOADERS[options.loader](tiles, batch, stager)
        # None of these loaders writes to a batch that it has given away.
        with xferlib.prefetch(batches, stager, rewrites=False) as loop:
            losses = train(loop)
            print(loop.bill)
            print(loop.report())
        print(f"{len(losses)} batches on {stager.device}")
    before, after = mean(losses[:10]), mean(losses[-10:])
    print(f"loss {before:.2f} -> {after:.2f}")
    assert len(losses) == steps, "batches were lost"
    assert after < 0.8 * before, "the model did not learn"


if __name__ == "__main__":
    main()
