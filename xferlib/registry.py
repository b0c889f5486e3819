"""Find backends: entry points of the group `xferlib.backends`, ours and a stranger's alike.

The core knows no backend by name. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal, SupportsIndex, cast

from xferlib.checks import flag, positive_nbytes, shorten
from xferlib.debug import resolve_debug
from xferlib.errors import BackendUnavailableError, CapabilityError, UnknownBackendError
from xferlib.memory.blocks import WhenFull, check_when_full
from xferlib.protocol import Capabilities, HostStager, Opener
from xferlib.resources import owns
from xferlib.stager import Stager
from xferlib.staging.profile import StagingProfile, as_profile, given_profile
from xferlib.uninterrupted import opening
from xferlib.workload import Workload

__all__ = ["backend_module", "backends", "open_backend", "stager", "workload_of"]

GROUP = "xferlib.backends"
HOST = "host"
OF_THE_CPU = {"cpu", "numpy"}
"""What people call that which needs no GPU."""
_entries: dict[tuple[str, ...], EntryPoint] = {}
"""By name and where packages are looked for: to read what all of them say takes some ten milliseconds."""


def backends() -> tuple[str, ...]:
    """Return the names of the installed backends, sorted. Loads none of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def stager(
    backend: str | HostStager[Any] = "auto",
    *,
    device: int = 0,
    pinned_limit: int | None = None,
    device_limit: int | None = None,
    when_full: WhenFull = "wait",
    strict: bool = False,
    staging: StagingProfile | str | None = None,
    debug: bool | None = None,
) -> Stager:
    """Open a stager.

    - `backend`: a name from `backends()`, "auto", or a `HostStager` of your own. "auto" takes the first by name that is ready on a
      GPU, else the first that declares itself a fallback.
    - `device`: which device, as the framework counts.
    - `pinned_limit`: bytes of pinned host memory at most: the pool's, and what `pin` and `SharedRing` lock. None: an eighth of the
      memory this process may use, or half of what is available.
    - `device_limit`: bytes of device memory that puts may take. None: what the device has.
    - `when_full`: what to do for an array that finds no room in pinned memory. "wait": wait while transfers in flight will make
      room, else raise `AllocationError`. "raise": raise it at once. "stage": take pageable memory, which is transferred through the
      pinned memory that is then kept for it.
    - `strict`: a put that would make its caller wait for a CPU copy raises `ValueError`. Without it, the first such put of a line
      issues a `SynchronousTransferWarning`.
    - `staging`: how pageable memory is staged, as "8x2MiB" (threads and chunk size) or a `StagingProfile`. None: what
      `XFERLIB_STAGING` says, else the default, which suits the usual links.
    - `debug`: find sources of puts, pinned or borrowed, that are written to before their transfer is done. The transfer then raises
      `SourceRewrittenError` with the line of the put; where nobody holds the transfer any more, the next put or `close()` does.
      This costs a pass of the CPU over each source at the put, and another when it is done, to compare sums. None: what
      `XFERLIB_DEBUG` says, "1" or "0".

    Raises `UnknownBackendError`, or `BackendUnavailableError` with what to do about it. In handlers of `atexit` of Python 3.12
    that may come of any backend: open a stager before the end.
    """
    for name, nbytes in (("pinned_limit", pinned_limit), ("device_limit", device_limit)):
        if nbytes is not None:
            positive_nbytes(nbytes, name)
    check_when_full(when_full)
    if not isinstance(device, SupportsIndex):
        raise TypeError(f"device={device!r}: expected a number, as the framework counts its devices from 0")
    profile = as_profile(staging) or given_profile()
    strict = flag(strict, "strict")
    debug = resolve_debug(None if debug is None else flag(debug, "debug"))
    with opening():
        if not isinstance(backend, str):
            opened = _checked(backend)
        elif backend == "auto":
            opened = _open_first(device)
        else:
            opened = open_backend(backend, device=device)
        try:
            return Stager(
                opened,
                pinned_limit=pinned_limit,
                device_limit=device_limit,
                when_full=when_full,
                strict=strict,
                staging=profile,
                debug=debug,
            )
        except BaseException:
            # A backend that was passed is the caller's. A stager that an interrupt lost on its way here closes its own backend.
            if isinstance(backend, str) and not owns(opened):
                opened.close()
            raise


def open_backend(name: str, *, device: int = 0) -> HostStager[Any]:
    """Open a backend by name, without a `Stager` around it."""
    opener = cast("Opener", _entry(name).load())
    try:
        return opener(device=device)
    except BackendUnavailableError as error:
        # It may have come a long way through the probes of the backend, none of which is at fault.
        shorten(error, opener.__module__.partition(".")[0])
        raise


def backend_module(name: str, module: Literal["workload", "conformance", "diagnosis"]) -> ModuleType | None:
    """Import what a backend ships beside its entry point; None if it ships no such module."""
    path = f"{_entry(name).module}.{module}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        # Only the module itself may be absent; what it imports may not.
        if error.name == path:
            return None
        raise


def workload_of(name: str) -> Workload:
    """Return the device work that a backend ships. Raises `CapabilityError` where it ships none."""
    module = backend_module(name, "workload")
    if module is None:
        raise CapabilityError(
            f"backend {name!r} ships no device work: no module 'workload' beside its entry point. Use another one"
        )
    return cast("Workload", module)


def _entry(name: str) -> EntryPoint:
    known = _entries.get((name, *sys.path))
    if known is not None:
        return known
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) > 1:
        raise UnknownBackendError(f"several installed packages provide backend {name!r}: {sorted(found)}. Uninstall all but one")
    if found:
        entry = _entries[name, *sys.path] = next(iter(found.values()))
        return entry
    installed = backends()
    meant = HOST if name.casefold() in OF_THE_CPU else name.casefold()
    close = difflib.get_close_matches(meant, installed, n=1)
    advice = (
        f'A backend is named after the library that you compute with. "auto" takes what is ready here, and "{HOST}" needs no GPU.'
    )
    suggestion = f"Did you mean {close[0]!r}?" if close else advice
    raise UnknownBackendError(
        f"no installed package provides backend {name!r}. {suggestion} Installed: {', '.join(installed) or 'none'}"
    )


def _checked(backend: object) -> HostStager[Any]:
    if isinstance(backend, Stager):
        raise TypeError(f"{backend!r} is a stager already. Use it as it is, or name a backend")
    if not isinstance(getattr(backend, "capabilities", None), Capabilities):
        raise TypeError(f'expected a backend\'s name, "auto" or a HostStager, got {backend!r}. Installed: {", ".join(backends())}')
    return cast("HostStager[Any]", backend)


def _open_first(device: int) -> HostStager[Any]:
    reasons: list[str] = []
    with ExitStack() as unused:
        fallback: HostStager[Any] | None = None
        for name in backends():
            try:
                opened = open_backend(name, device=device)
            except BackendUnavailableError as error:
                reasons.append(str(error))
                continue
            if opened.on_gpu:
                return opened
            if opened.fallback and fallback is None:
                fallback = opened
                keep = unused.enter_context(ExitStack())
                keep.callback(opened.close)
            else:
                opened.close()
        if fallback is not None:
            keep.pop_all()
            return fallback
    raise BackendUnavailableError("no installed backend can run here: " + ("; ".join(reasons) or "none is installed"))
