"""The engine's library as ctypes sees it: found, checked, and described. The contracts of its calls are in the headers.

A forked child loads it anew: its parent's threads are not there, and its parent's lock may be held for ever.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TypeVar

from xferlib.engine.building import library_name

__all__ = [
    "BUSY",
    "D2H",
    "FAILED",
    "FINISHED",
    "H2D",
    "ISSUED",
    "LEFT",
    "MOST_FUNCTIONS",
    "MOST_PIECES",
    "NOT_YET",
    "OK",
    "STAGED",
    "STOPPED",
    "UNKNOWN",
    "VERSION",
    "Call",
    "Callback",
    "Calls",
    "EngineContext",
    "Figures",
    "File",
    "Frame",
    "Piece",
    "Python",
    "Reads",
    "Request",
    "gil_library",
    "library",
    "opened",
]

H2D, D2H = range(2)
STAGED, ISSUED, FINISHED = range(3)
OK, NOT_YET, FAILED, UNKNOWN, STOPPED, BUSY = 1, 0, -1, -2, -4, -5
LEFT = 3
"""`XE_LEFT`."""
MOST_PIECES = 256
"""`XE_MOST_PIECES`."""
MOST_FUNCTIONS = 4096
"""`XE_MOST_FUNCTIONS`."""

VERSION = 5
FOLDER = Path(__file__).parent
REBUILD = "Rebuild it: pip install -e . in a checkout, else pip install --force-reinstall xferlib"

Library = TypeVar("Library", bound=ctypes.CDLL)

_I32, _I64, _U32, _U64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Calls(ctypes.Structure):
    """`xe_calls`."""

    _fields_ = (
        ("version", _U32),
        ("nbytes", _U32),
        ("context", _P),
        ("not_ready", _I32),
        ("relaxed", _I32),
        ("enter", _P),
        ("current", _P),
        ("capture_mode", _P),
        ("copy_h2d", _P),
        ("copy_d2h", _P),
        ("record", _P),
        ("query", _P),
        ("wait", _P),
    )


class EngineContext(ctypes.Structure):
    """`xe_context`."""

    _fields_ = (
        ("context", _P),
        ("relaxed", _I32),
        ("reserved", _I32),
        ("push", _P),
        ("pop", _P),
        ("capture_mode", _P),
        ("copy_h2d", _P),
        ("copy_d2h", _P),
        ("record", _P),
        ("wait", _P),
        ("query_event", _P),
        ("query_stream", _P),
        ("synchronize", _P),
        ("pointer_attribute", _P),
    )


class Piece(ctypes.Structure):
    """`xe_piece`."""

    _fields_ = (("host", _P), ("device", _U64), ("nbytes", _U64), ("block", _U64))


class File(ctypes.Structure):
    """`xe_file`."""

    _fields_ = (("memory", _P), ("nbytes", _U64), ("descriptor", _I32), ("reserved", _I32))


class Request(ctypes.Structure):
    """`xe_request`."""

    _fields_ = (
        ("id", _U64),
        ("chunk", _U64),
        ("device", _U64),
        ("memory", _P),
        ("nbytes", _U64),
        ("lane", _U32),
        ("first", ctypes.c_uint8),
        ("record", ctypes.c_uint8),
        ("last", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8),
    )


class Figures(ctypes.Structure):
    """`xe_figures`."""

    _fields_ = (
        ("threads", _U64),
        ("jobs", _U64),
        ("chunks", _U64),
        ("sleeps", _U64),
        ("polls", _U64),
        ("copied_nbytes", _U64),
    )


class Python(ctypes.Structure):
    """`xe_python`."""

    _fields_ = (
        ("this_thread", _P),
        ("ensure", _P),
        ("release", _P),
        ("frame", _P),
        ("code", _P),
        ("at", _P),
        ("back", _P),
        ("decref", _P),
        ("gc_disable", _P),
        ("gc_enable", _P),
    )


class Call(ctypes.Structure):
    """`xe_call`."""

    _fields_ = (
        ("start", _U64),
        ("end", _U64),
        ("destination", _U64),
        ("source", _U64),
        ("nbytes", _U64),
        ("first", _U64),
        ("frames", _U32),
        ("correlation", _U32),
        ("domain", _U32),
        ("function", _U32),
        ("thread", _U32),
        ("reserved", _U32),
    )


class Frame(ctypes.Structure):
    """`xe_frame`."""

    _fields_ = (("code", _P), ("at", _I32), ("reserved", _I32))


class Reads(ctypes.Structure):
    """`xe_reads`."""

    _fields_ = tuple((name, ctypes.c_uint8) for name in ("known", "nbytes", "pointed", "late", "batch"))


class Callback(ctypes.Structure):
    """`xe_callback`."""

    _fields_ = (
        ("next", _P),
        ("recording", _U64),
        ("serial", _U64),
        ("thread", _U64),
        ("function", ctypes.c_char_p),
        ("context", _P),
        ("domain", _U32),
        ("number", _U32),
        ("enters", _U32),
        ("state", _U32),
        ("parameters", _U64 * 10),
        ("pointed", _U64 * 25),
    )


_SIGNATURES = {
    "xe_start": (_I, (_I,)),
    "xe_start_near": (_I, (_I, _I, ctypes.c_char_p, _N)),
    "xe_open_lane": (_I, (_U32, _I, ctypes.POINTER(Calls), _P)),
    "xe_close_lane": (_I, (_U32,)),
    "xe_add_chunk": (_I, (_U32, _U64, _P, _N, _U64, _P)),
    "xe_take_chunk": (_I, (_U32, _U64)),
    "xe_submit": (_I, (_U64, _U32, ctypes.POINTER(Piece), _N, ctypes.POINTER(File), _P, _P)),
    "xe_abandon": (_I, (_U64,)),
    "xe_wait": (_I, (_U64, _I, _I64)),
    "xe_error": (_I, (_U64, ctypes.POINTER(_I32), ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(_I))),
    "xe_finished": (_N, (ctypes.POINTER(_U64), _N)),
    "xe_forget": (_I, (_U64,)),
    "xe_requests": (_N, (ctypes.POINTER(Request), _N, _I64)),
    "xe_answer": (_I, (_U32, _U64, _I32, _I)),
    "xe_reached": (_I, (_U32, _U64, _I32)),
    "xe_stop": (_I, (_I64,)),
    "xe_read_figures": (None, (ctypes.POINTER(Figures),)),
    "xe_copy": (_I, (_P, _P, _N, _I)),
    "xe_copies_d2h": (_I, (ctypes.POINTER(Calls), _P, _P, _P, _P, _N)),
    "xe_gather": (_I, (_P, _P, _I, ctypes.POINTER(_I64), ctypes.POINTER(_I64), _N)),
    "xe_touch": (_I, (_P, _N)),
    "xe_read_ahead": (_I, (_I, _I64, _N)),
    # Device addresses are described as pointers, too: ctypes takes those in half the time.
    "xe_context_copy_h2d": (_I, (_P, _P, _P, _N, _P)),
    "xe_context_copy_d2h": (_I, (_P, _P, _P, _N, _P)),
    "xe_context_record": (_I, (_P, _P, _P)),
    "xe_context_wait": (_I, (_P, _P, _P)),
    "xe_context_query_event": (_I, (_P, _P)),
    "xe_context_query_stream": (_I, (_P, _P)),
    "xe_context_synchronize": (_I, (_P, _P)),
    "xe_context_pointer_attribute": (_I, (_P, _P, _I, _P)),
    "xe_activity_start": (_I, (_N, _N, _N, ctypes.c_char_p, ctypes.POINTER(Python))),
    "xe_activity_stop": (None, ()),
    "xe_activity_now": (_U64, ()),
    "xe_activity_take": (_P, (ctypes.POINTER(_N),)),
    "xe_activity_free": (None, (_P,)),
    "xe_activity_calls": (_P, (ctypes.POINTER(_N),)),
    "xe_activity_frames": (_P, (ctypes.POINTER(_N),)),
    "xe_activity_drop": (None, ()),
    "xe_activity_lost": (_U64, ()),
    "xe_callbacks_start": (_I, (_U64, _I64, _P, _P, ctypes.POINTER(Reads))),
    "xe_callbacks_stop": (None, (_U64,)),
    "xe_callbacks_nest": (None, (_I,)),
    "xe_callbacks_wait": (_I, (_U64,)),
    "xe_callbacks_take": (ctypes.POINTER(Callback), (_U64,)),
    "xe_callbacks_handled": (None, (ctypes.POINTER(Callback),)),
    "xe_callbacks_missed": (_U64, (_U64,)),
    "xe_callbacks_forgive": (None, (_U64,)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with its calls described. Raises `ImportError`, saying what to do."""
    found = _described(opened(_path(), anew=_is_parents))
    # Several threads may have come here at once, and in a forked child each has loaded an engine of its own.
    return _loaded.setdefault("library", found)


@functools.cache
def gil_library() -> ctypes.PyDLL:
    """Return the same library, for calls that wait for nothing. They keep the GIL: giving it up would take longer than the call."""
    return _described(ctypes.PyDLL(library()._name, handle=library()._handle))


_loaded: dict[str, ctypes.CDLL] = {}
_is_parents = False
"""Whether the library was loaded before this process was forked."""


def _note_fork() -> None:
    global _is_parents
    _is_parents = _is_parents or bool(_loaded)
    _loaded.clear()
    library.cache_clear()
    gil_library.cache_clear()


os.register_at_fork(after_in_child=_note_fork)


def _described(found: Library) -> Library:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def opened(path: Path, *, anew: bool = False) -> ctypes.CDLL:
    """Load a library and check that it is what its name says. Raises `ImportError`.

    `anew`: load it with a state of its own, since this process may have loaded it already.
    """
    try:
        found = _copy_of(path) if anew else ctypes.CDLL(str(path))
        found.xe_source_hash.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise ImportError(f"the engine cannot be loaded: {error}. {REBUILD}", path=str(path)) from error
    told = found.xe_source_hash().decode()
    if path.stem.removeprefix("libxferlib-") != told or found.xe_version() != VERSION:
        raise ImportError(f"the engine in {str(path)!r} was built from other sources ({told!r}). {REBUILD}", path=str(path))
    return found


def _copy_of(path: Path) -> ctypes.CDLL:
    # The loader recognizes a file that it has loaded, by its name and by its number.
    copy = os.memfd_create(path.name)
    try:
        with open(copy, "wb", closefd=False) as file:
            file.write(path.read_bytes())
        return ctypes.CDLL(f"/proc/{os.getpid()}/fd/{copy}")
    finally:
        os.close(copy)


def _path() -> Path:
    try:
        # In a checkout, where the sources may have changed since the library was built.
        return FOLDER / library_name(FOLDER)
    except FileNotFoundError:
        built = sorted(FOLDER.glob("libxferlib-*.so"))
    if len(built) != 1:
        raise ImportError(f"the engine is not in {str(FOLDER)!r}, or more than once: {[file.name for file in built]}. {REBUILD}")
    return built[0]
