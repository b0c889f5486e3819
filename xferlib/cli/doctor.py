"""What this machine has: backends, ready or not and why, versions, memory, and settings that break overlap.

Backends are opened, one after the other, looked at for some seconds, and closed again. Whatever a backend raises when it is opened
is a finding, never the end of the page.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil

from xferlib.cli.breakeven import break_even
from xferlib.cli.diagnosis import diagnosis, own_versions
from xferlib.cli.link import measured_link
from xferlib.cli.machine import is_wsl, little_memory, no_gpu, settings, unreadable, wsl
from xferlib.cli.paths import findings_of, paths_of, slow_of_ours
from xferlib.errors import AllocationError, CapabilityError, XferError
from xferlib.memory.limits import default_pinned_limit, memory_limit
from xferlib.overlap.measure import measure_overlap
from xferlib.registry import backends, stager
from xferlib.stager import Stager
from xferlib.staging.profile import StagingProfile
from xferlib.words import in_words

__all__ = ["Report", "examine", "lacking"]

Report = dict[str, Any]

SECONDS, OF_PATHS = 20.0, 6.0
"""What the page may take in all, and what the paths of one backend take at most: what would not fit is not measured."""
PATHS_NBYTES, PATHS_ROUNDS = 64 << 20, 5
"""Of fewer rounds one in which something else used the device would decide."""
WALL_STEP, HIGHEST_WALL = 128 << 20, 4 << 30
"""Bytes. How much more is asked for at a time, and up to where."""


def examine() -> Report:
    """Return the findings as plain values: the schema of `doctor --json`. Takes at most some 20 s."""
    end = time.monotonic() + SECONDS - OF_PATHS
    memory = psutil.virtual_memory()
    unread = unreadable()
    # A backend must not be blamed for what is not its fault.
    instead: Report = {"staging": StagingProfile(1, 1 << 20), "debug": False} if unread else {}
    states = [_backend(name, instead, end) for name in backends()]
    return {
        "versions": own_versions(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": {
            "total_nbytes": int(memory.total),
            "available_nbytes": int(memory.available),
            "limit_nbytes": memory_limit(),
            "pinned_limit_nbytes": default_pinned_limit(),
            "memlock_nbytes": _memlock(),
        },
        "auto": _auto(instead),
        "backends": states,
        "findings": [*settings(), *unread, *little_memory(), *wsl(states), *no_gpu(states)],
    }


def lacking(report: Report, names: Sequence[str]) -> list[str]:
    """Return a sentence for each required backend that is not ready."""
    states = {state["name"]: state for state in report["backends"]}
    lines = []
    for name in names:
        state = states.get(name)
        if state is None:
            lines.append(f"required backend {name!r} is not installed. Installed: {', '.join(states) or 'none'}")
        elif not state["ready"]:
            lines.append(f"required backend {name!r} is not ready: {state['reason']}")
    return lines


def _backend(name: str, instead: Report, end: float) -> Report:
    """Return what is known of a backend. `end`: when, by `time.monotonic`, nothing long may begin any more."""
    slow: list[str] = []
    nothing = dict.fromkeys(("reason", "device", "on_gpu", "capabilities", "link", "pin", "wall_nbytes", "paths", "staging"))
    state: Report = {"name": name, "ready": False} | nothing
    try:
        with stager(name, **instead) as opened:
            state |= {"ready": True, "device": opened.device, "on_gpu": opened.on_gpu, "capabilities": asdict(opened.capabilities)}
            state["link"], slow = _link(opened)
            state["pin"] = _break_even(opened)
            state["paths"], held_up = _paths(opened, end)
            state["wall_nbytes"], refused = _wall(opened)
            slow += [*held_up, *refused]
            state["staging"] = None if instead else str(opened.staging)
    except XferError as error:
        state["reason"] = str(error)
    except Exception as error:
        state["reason"] = f"it is broken: {type(error).__name__}: {error}"
    told = _diagnosed(name)
    return state | told | {"findings": [*told["findings"], *slow]}


def _link(opened: Stager) -> tuple[Report | None, list[str]]:
    """Return what is known of the device's link, and what is wrong with it."""
    try:
        link = measured_link(opened)
    except XferError as error:
        # As for what is measured below.
        return {"error": str(error)}, []
    return (None, []) if link is None else (asdict(link), link.findings())


def _break_even(opened: Stager) -> Report | None:
    try:
        found = break_even(opened)
    except XferError as error:
        # The backend is ready; the device may be full just now.
        return {"error": str(error)}
    return None if found is None else asdict(found) | {"transfers": found.transfers}


def _paths(opened: Stager, end: float) -> tuple[list[Report] | None, list[str]]:
    """Return which way the framework's own copies go, and a sentence for each that holds something up."""
    if not opened.on_gpu:
        return None, []
    if time.monotonic() > end:
        return None, [
            f"its copies were not looked at, since this page takes at most {SECONDS:g} s: xferlib overlap {opened.name} does"
        ]
    try:
        report = measure_overlap(opened, nbytes=PATHS_NBYTES, rounds=PATHS_ROUNDS)
    except CapabilityError:
        # A backend may ship no device work.
        return None, []
    except Exception as error:
        # The backend is ready; what computes beside its copies may be broken, or the device full.
        return None, [f"copies of {opened.name} could not be looked at: {type(error).__name__}: {error}"]
    finally:
        opened.trim()
    paths = paths_of(report)
    told = [asdict(path) | {"staged": path.staged, "words": path.words} for path in paths]
    return told, [*slow_of_ours(report), *findings_of(paths, opened.name)]


def _wall(opened: Stager) -> tuple[int | None, list[str]]:
    """Return how many bytes the driver page-locks, where it is known for a wall far below the machine's memory, and what to do."""
    if not (is_wsl() and opened.on_gpu and opened.capabilities.pinned):
        return None, []
    held: list[Any] = []
    most = min(HIGHEST_WALL, opened.stats().pinned_limit_nbytes) - opened.stats().pinned_nbytes
    try:
        _fill(opened, held, most)
        return None, []
    except AllocationError:
        wall = len(held) * WALL_STEP
    finally:
        held.clear()
        opened.trim()
    found = [
        f"{opened.name}: the driver page-locked {in_words(wall)} here and refused more. Pass pinned_limit={wall >> 20} << 20 or "
        "less to xferlib.stager, so that it is not asked"
    ]
    try:
        # What was refused is over; a framework that keeps the error would raise it at the next call, whatever that is.
        source = opened.empty_pinned(1 << 16, np.uint8)
        source[:] = 7
        if not (opened.get(opened.put(source).value).result() == 7).all():
            found.append(f"{opened.name}: a copy after that refusal brought wrong bytes. Report this, with `xferlib doctor --json`")
    except Exception as error:
        found.append(
            f"{opened.name}: the refusal left an error behind, so that the next copy failed ({type(error).__name__}: {error}). "
            "Stay below that limit, and start the program anew if memory was refused"
        )
    return wall, found


def _fill(opened: Stager, held: list[Any], most: int) -> None:
    while len(held) * WALL_STEP + WALL_STEP <= most:
        held.append(opened.empty_pinned(WALL_STEP, np.uint8))


def _diagnosed(name: str) -> Report:
    try:
        told = diagnosis(name)
        if told is None:
            return {"versions": {}, "findings": []}
        return {"versions": told.versions(), "findings": told.findings()}
    except Exception as error:
        return {"versions": {}, "findings": [f"the diagnosis of backend {name!r} is broken: {type(error).__name__}: {error}"]}


def _auto(instead: Report) -> str | None:
    try:
        with stager("auto", **instead) as opened:
            return opened.name
    except Exception:
        # None is there, or one is broken, which says so in its own row.
        return None


def _memlock() -> int | None:
    """Return the limit on locked memory of this process; None: there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit
