"""Load a state once, in a process of its own: `python -m benchmarks.fresh_load BACKEND NAME PATH COUNT NBYTES`.

Prints the seconds, and how much anonymous memory it took. Packages are imported, and the device is opened, before. Every byte is
compared.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import xferlib
from benchmarks import ours, states
from benchmarks.devices import open_device
from benchmarks.peers.state_calls import loaders

__all__ = ["main"]


def main(backend: str, name: str, path: Path, count: int, nbytes: int) -> dict[str, float]:
    """Load, compare, and return the figures."""
    device = open_device(backend)
    device.synchronize()
    memory = states.Anonymous()
    with ExitStack() as opened:
        loader = ours.loader(opened.enter_context(xferlib.stager(backend))) if name == ours.NAME else loaders(backend)[name]()
        with memory.watch():
            begin = time.perf_counter()
            found = loader.load(path)
            seconds = time.perf_counter() - begin
        states.verify(name, "h2d", ((key, loader.host(array)) for key, array in found.items()), count, nbytes)
        del found
    return {"seconds": seconds, "anonymous_nbytes": memory.peak_nbytes}


if __name__ == "__main__":
    backend, name, path, count, nbytes = sys.argv[1:]
    print(json.dumps(main(backend, name, Path(path), int(count), int(nbytes))))
