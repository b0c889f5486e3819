"""Run Adam over a state for which the device has no room: weights and moments live on the host, and come group by group.

    python examples/offload_adam.py --quick
    python examples/offload_adam.py --backend jax --groups 48 --mib 256

While one group is updated the next one comes, and the last one goes: the device has a few groups at a time. In the end the same
updates are made without the host, and every bit is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import xferlib

NUMPY_LIKE = {"host": "numpy", "cupy": "cupy", "jax": "jax.numpy"}
MIB = 1 << 20
ARRAYS = ("weights", "mean", "square")
DEPTH = 2
Group: TypeAlias = dict[str, Any]


def adam(library: Any, group: Group, step: float) -> Group:
    """Return a group after one step of Adam towards weights of one, from arrays of any library that computes as NumPy does."""
    gradient = group["weights"] - 1
    mean = 0.9 * group["mean"] + 0.1 * gradient
    square = 0.999 * group["square"] + 0.001 * gradient * gradient
    size = 0.01 / (1 - 0.9**step)
    weights = group["weights"] - size * mean / (library.sqrt(square / (1 - 0.999**step)) + 1e-8)
    return {name: array.astype("float32") for name, array in zip(ARRAYS, (weights, mean, square), strict=True)}


def make_update(backend: str) -> Callable[[Group, float], Group]:
    """Return Adam's step for a backend's arrays. It may take over the memory of what it is given."""
    library = import_module(NUMPY_LIKE[backend])
    if backend != "jax":
        return lambda group, step: adam(library, group, step)
    import jax

    compiled: Callable[..., Group] = jax.jit(lambda group, step: adam(library, group, step), donate_argnums=0)
    return lambda group, step: compiled(group, np.float32(step))


def beginning(groups: int, count: int) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
    """Return weights, and moments that are zero, for groups of so many parameters."""
    zeros = np.broadcast_to(np.float32(0), (count,))
    return {
        f"layer_{number}": {
            "weights": np.random.default_rng(number).standard_normal(count, np.float32),
            "mean": zeros,
            "square": zeros,
        }
        for number in range(groups)
    }


def train(home: xferlib.HostTree, update: Callable[[Group, float], Group], steps: int) -> None:
    """Make so many steps over all groups."""
    for step in range(1, steps + 1):
        for name, group in home.fetch_each():
            group = update(group, float(step))
            home.store(name, group)
            # Else it would stay on the device beside the next one.
            del group
    home.synchronize()


def main() -> None:
    """Train twice, and compare."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="host", choices=NUMPY_LIKE)
    arguments.add_argument("--groups", type=int, default=12)
    arguments.add_argument("--mib", type=float, default=96, help="size of each group's weights and moments together")
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--quick", action="store_true", help="6 MiB each")
    options = arguments.parse_args()
    count = int((6 if options.quick else options.mib) * MIB) // (4 * len(ARRAYS))
    tree = beginning(options.groups, count)
    nbytes = options.groups * len(ARRAYS) * 4 * count
    update = make_update(options.backend)
    # Room for all of the home, and for what the stager needs beside it; on the device for a few groups.
    limits = {"pinned_limit": nbytes + 256 * MIB, "device_limit": (DEPTH + 3) * nbytes // options.groups}
    with (
        xferlib.stager(options.backend, **limits) as stager,
        xferlib.HostTree(tree, stager, depth=DEPTH) as home,
    ):
        started = perf_counter()
        train(home, update, options.steps)
        seconds = perf_counter() - started
        rate = 2 * options.steps * home.nbytes / seconds / 1e9
        peak = stager.stats().device_peak_nbytes
        print(f"{options.steps} steps over {home.nbytes / MIB:.0f} MiB on {stager.device}: {rate:.1f} GB/s both ways")
        print(f"groups that came took at most {peak / MIB:.0f} MiB on the device at a time")
        assert peak <= limits["device_limit"]
        for name, group in tree.items():
            alone = stager.put(group, borrow=True).result()
            for step in range(1, options.steps + 1):
                alone = update(alone, float(step))
            want, got = stager.get(alone).result(), home[name]
            assert all(np.array_equal(got[key].view(np.uint32), want[key].view(np.uint32)) for key in ARRAYS), f"{name} differs"
    print("every byte verified")


if __name__ == "__main__":
    main()
