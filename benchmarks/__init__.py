"""Named benchmarks against peers and against the physical limit. Run from a clone: `python benchmarks/run.py --list`."""
