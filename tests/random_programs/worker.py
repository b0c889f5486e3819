"""The process that runs programs: requests in, outcomes out, a line each. A hang ends it, with every thread's traceback."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import sys
import threading
import time
import warnings
from typing import Any

from tests.random_programs.content import raw
from tests.random_programs.defects import DEFECTS
from tests.random_programs.draw import draw_program
from tests.random_programs.hangs import HANG_SECONDS, begin_program, end_program
from tests.random_programs.kits import Kit, kit_named
from tests.random_programs.program import Program
from tests.random_programs.run import listen, run_program, running
from tests.random_programs.traits import Traits
from xferlib.errors import BackendUnavailableError

__all__ = ["serve"]


def traits_of(kit: Kit) -> Traits:
    files = ("npy", "npz", "safetensors") if importlib.util.find_spec("safetensors") else ("npy", "npz")
    flags = kit.flags
    return Traits(
        backend=kit.name,
        streams=flags.streams,
        put_into=flags.put_into,
        mapped=flags.mapped,
        register=flags.register,
        on_gpu=kit.on_gpu,
        has_current=kit.has_current,
        devices=kit.devices,
        dtypes=kit.dtypes,
        layouts=kit.layouts,
        views=kit.views,
        has_empty_views=kit.has_empty_views,
        canaries=tuple(sorted(kit.canaries)),
        holds=kit.holds,
        held_sizes=kit.held_sizes,
        files=files,
    )


def serve(backend: str, defect: str | None = None) -> None:
    """Run what is asked for on standard input until it ends. `defect`: one of `DEFECTS`, to be planted first."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # What anybody prints goes to the log.
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    try:
        kit = kit_named(backend)
    except BackendUnavailableError as error:
        print(json.dumps({"unavailable": str(error)}), file=out)
        return
    listen()
    kit.warm()
    raw("first", 1)
    raw("first", 1, booleans=True)
    if defect is not None:
        DEFECTS[defect]()
    traits = traits_of(kit)
    gc.collect()
    gc.freeze()
    threading.Thread(target=_tell_what_hangs, name="random-programs-hangs", daemon=True).start()
    print(json.dumps({"ready": True, "on_gpu": kit.on_gpu}), file=out)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), kit, traits)), file=out)


def _tell_what_hangs() -> None:
    """Print the step that is under way, and what is held, once for each that takes very long."""
    before, since, told = "", 0, False
    while True:
        time.sleep(1)
        for world in list(running):
            doing = world.doing
            since, told = (since + 1, told) if doing == before else (0, False)
            before = doing
            if since >= HANG_SECONDS / 3 and not told:
                told = True
                print(f"for {since} s: {doing}; held: {list(world.holds)}", file=sys.stderr, flush=True)


def _answer(request: dict[str, Any], kit: Kit, traits: Traits) -> dict[str, Any]:
    if "program" in request:
        program = Program.from_json(request["program"])
    else:
        program = draw_program(traits, request["seed"], request["number"], large=request["large"])
    if request.get("only_draw"):
        return {"program": program.to_json()}
    begin_program()
    outcome = run_program(program, kit, tidy=request.get("tidy", False))
    end_program()
    answer: dict[str, Any] = {
        "failure": outcome.failure,
        "at": outcome.at,
        "skipped": outcome.skipped,
        "steps": program.count,
        "seconds": outcome.seconds,
        "rss": _rss(),
    }
    if outcome.failure is not None:
        answer |= {"trace": outcome.trace, "program": program.to_json()}
    return answer


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve(*sys.argv[1:])
