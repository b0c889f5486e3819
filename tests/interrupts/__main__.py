"""Interrupts by the thousand, of a backend on its device: `python -m tests.interrupts --backend cupy --times 5000`.

Prints how many there were of each operation, and fails where one left something held or behind.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
import warnings

from tests.interrupts.transfers import OPERATIONS, interrupt

HANG_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts", description=__doc__)
    parser.add_argument("--backend", choices=OPERATIONS, default="host")
    parser.add_argument("--times", type=int, default=5000, help="how many interrupts in all")
    parser.add_argument("--seed", type=int, default=1, help="from which the moments are drawn")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    operations = OPERATIONS[options.backend]
    each, began, hits = -(-options.times // len(operations)), time.monotonic(), {}
    for name, operation in operations.items():
        # Of a failure the last line tells at what.
        print(f"at {name!r}", flush=True)
        # A hang ends with a traceback: what is looked for here is locks that stay held.
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        hits[name] = interrupt(options.backend, operation, times=each, seed=options.seed, strikes=1, meanwhile="idle")
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"backend": options.backend, "interrupts": sum(hits.values()), "of": hits}, indent=2))
    print(f"in {time.monotonic() - began:.0f} s: nothing is held, nothing is left behind")


if __name__ == "__main__":
    main()
