"""Run the benchmarks from a clone, with xferlib installed: `python benchmarks/run.py --list`."""

import sys
from pathlib import Path

# Before the clone's root is in the path: the installed xferlib is measured, which may be the clone itself or not.
import xferlib  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())
