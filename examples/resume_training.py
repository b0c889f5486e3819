"""Train a small JAX model that saves its state while it trains, kill it, go on, and end bit for bit where it would have ended.

    python examples/resume_training.py --quick

A process of its own is killed behind a step, with a save under way. This one goes on from the newest file, and then trains from the
beginning, to compare. Each step takes over the memory of the state before it (donation), so a save reads a copy on the device, a
snapshot: the next step waits for nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import xferlib

SAVE_EVERY = 5
KEPT = 2


def blank(width: int) -> dict[str, Any]:
    """Return a state before its first step."""
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return {"weights": weights, "momenta": [weight * 0 for weight in weights], "step": 0}


@cache
def make_step(width: int) -> Any:
    """Return the training step: what it is given it takes over."""
    import jax

    def loss(weights: Any, batch: Any) -> Any:
        hidden = jax.numpy.tanh(batch @ weights[0])
        return ((hidden @ weights[1] - batch) ** 2).mean()

    def step(weights: Any, momenta: Any, number: Any) -> Any:
        batch = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (64, width))
        gradients = jax.grad(loss)(weights, batch)
        momenta = [0.9 * momentum + gradient for momentum, gradient in zip(momenta, gradients, strict=True)]
        return [weight - 0.1 * momentum for weight, momentum in zip(weights, momenta, strict=True)], momenta

    return jax.jit(step, donate_argnums=(0, 1))


def newest(folder: Path) -> Path | None:
    """Return the file of the last save that came to its end. What a killed process left half-written has another name."""
    files = folder.glob("step_*.safetensors")
    return max(files, key=lambda path: int(re.findall(r"\d+", path.stem)[-1]), default=None)


def train(folder: Path, steps: int, width: int, die_at: int | None) -> str:
    """Train from the newest file on, and return a checksum of the last state. `die_at`: the step at which the process is killed."""
    import jax
    import numpy as np

    step = make_step(width)
    with xferlib.stager("jax") as stager:
        file = newest(folder)
        state = blank(width) if file is None else xferlib.load(file, stager, like=blank(width))
        print(f"process {os.getpid()} begins at step {state['step']}")
        save: xferlib.Save | None = None
        for number in range(state["step"], steps):
            if save is not None:
                # At once, if the device had room for a snapshot. If not, the step must not have the arrays before they are read.
                save.wait_read()
            weights, momenta = step(state["weights"], state["momenta"], number)
            state = {"weights": weights, "momenta": momenta, "step": number + 1}
            if state["step"] % SAVE_EVERY == 0:
                if save is not None:
                    # One at a time: each has a copy of the state on the device.
                    save.result()
                path = folder / f"step_{state['step']}.safetensors"
                save = xferlib.save(path, state, stager, snapshot=True, keep=KEPT)
            if die_at == state["step"]:
                os.kill(os.getpid(), signal.SIGKILL)
        if save is not None:
            save.result()
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(stager.get(state).result()):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def main() -> None:
    """Compare a run that was killed and went on with one that was not."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="a model of a megabyte")
    arguments.add_argument("--die-in", type=Path, metavar="FOLDER", help="train there, and be killed")
    options = arguments.parse_args()
    width, steps, die_at = (256, 30, 18) if options.quick else (4096, 200, 113)
    if options.die_in is not None:
        train(options.die_in, steps, width, die_at)
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
        command = [sys.executable, __file__, "--die-in", cut, *(["--quick"] if options.quick else [])]
        killed = subprocess.run(command, check=False)
        assert killed.returncode == -signal.SIGKILL, "it was not killed"
        print(f"killed behind step {die_at}, and left {', '.join(sorted(path.name for path in Path(cut).iterdir()))}")
        assert newest(Path(cut)) is not None, "nothing was saved"
        resumed = train(Path(cut), steps, width, None)
        expected = train(Path(whole), steps, width, None)
        left = sorted(path.name for path in Path(cut).iterdir())
    assert resumed == expected, "the states differ"
    assert left == sorted(f"step_{number}.safetensors" for number in (steps - SAVE_EVERY, steps)), f"left over: {left}"
    print("every byte verified: the run that was killed ended where the other one did")


if __name__ == "__main__":
    main()
