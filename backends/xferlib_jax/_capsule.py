"""DLPack structs of our own, whose deleter tells when a buffer, and not just its array, was let go.

Aliases share a buffer under other Python objects, a donated result takes it over, and a computation under way holds it alone; only
the deleter of the capsule that the buffer was imported from knows of all that.

The deleter is `pthread_spin_unlock` of the C library. XLA calls deleters on threads of its own. A Python function would ask for the
GIL there, and another thread may hold the GIL while it waits for XLA: that ends in a deadlock. What is needed is compiled code that
any thread may call at any time, also while the interpreter goes down, that takes one pointer and leaves a trace. This function only
stores the state of an unlocked lock (0, or 1 on x86) into the word that the pointer names. That word is the low half of the
struct's `data`. Before, it is never 0 or 1, and the importer has read it by then. Compiled code of our own would do the same, but
would turn a package that installs anywhere into one that needs a compiler.

Invariants: a struct is given to one importer at a time; the memory of structs is never freed, so that a late call harms nobody; a
struct that JAX has taken stays in the table of those in use until its deleter was called, whatever interrupts the import.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import numpy as np

__all__ = ["LAYOUT", "MOST_SHAPES", "NAME", "Capsules", "Exporter", "capsules", "pointer"]

# DLManagedTensor of DLPack before version 1, the only one that JAX takes: data, device type and number, ndim, dtype code, bits and
# lanes, shape, strides, byte offset, context, deleter.
LAYOUT = struct.Struct("<QiiiBBHQQQQQ")
NBYTES = LAYOUT.size
NAME = b"dltensor"
CHUNK = 512
MOST_SHAPES = 1024
"""How many shapes are kept for arrays to come."""
ONE_BY_ONE = 16
"""Up to so many structs are looked at one by one in less time than all words of a chunk together."""
BIAS = 128
"""How far `data` points before the memory, which starts at a multiple of 256: so its low half is never that of an unlocked lock."""

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

T = TypeVar("T")
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]


class Slot(NamedTuple):
    """A struct: its address, the bytes of its chunk's structs, and its number there."""

    start: int
    raw: memoryview
    number: int


Loan: TypeAlias = tuple[Slot, object, object]
"""A struct in use: what lives until it is let go, and the shape that the importer reads."""

_SLOT = operator.itemgetter(0)
_POP = deque.pop


@final
class Capsules:
    """The structs of this process, shared by all stagers: arrays outlive theirs. Any thread. There is one: `capsules()`."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._allocate = library.malloc
        self._allocate.restype, self._allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        deleter = ctypes.cast(library.pthread_spin_unlock, ctypes.c_void_p).value
        assert deleter is not None
        self._deleter = deleter
        self._mark = _unlocked_state(deleter)
        self._mark_word = np.array(self._mark, np.uint32)
        # Which structs of a chunk have the mark, filled by a sweep; NumPy takes thirty times as long to tell whether any has it.
        self._flags = bytearray(CHUNK)
        self._are_marked = np.frombuffer(self._flags, np.bool_)
        # The first words of structs, by chunk and one by one.
        self._chunks: list[tuple[int, Words]] = []
        self._words: dict[int, ctypes.c_uint32] = {}
        self._free: deque[Slot] = deque()
        self._live: dict[int, Loan] = {}
        # Imports that failed or were interrupted at any point: what they had taken, and the capsule if it was made.
        self._cut_off: deque[tuple[list[Slot], Any]] = deque()
        # One thread at a time: between a look at a struct's mark and what follows, another could free it and a third give it out.
        self._sweeping = threading.Lock()

    def lend(
        self,
        address: int,
        shape: tuple[int, ...],
        code: int,
        bits: int,
        device: tuple[int, int],
        lease: object,
        convert: Callable[..., T],
        *rest: Any,
    ) -> T:
        """Return `convert(capsule, *rest)` for a capsule over memory at a multiple of 256, to be imported once.

        If it was imported, `lease` lives until a `sweep` finds that the importer has let the memory go; else until the next one.
        """
        lengths, where = _lengths(shape)
        kind, ordinal = device
        capsule = None
        taken: list[Slot] = []
        try:
            self._take(taken)
            slot = taken[0]
            start = slot.number * NBYTES
            LAYOUT.pack_into(
                slot.raw, start, address - BIAS, kind, ordinal, len(shape), code, bits, 1, where, 0, BIAS, 0, self._deleter
            )
            self._live[slot.start] = (slot, lease, lengths)
            capsule = _new(slot.start, NAME, None)
            return convert(capsule, *rest)
        except BaseException:
            # One call, made before another interrupt can come. The next sweep finds out how far the import got.
            self._cut_off.append((taken, capsule))
            raise

    def sweep(self) -> None:
        """Let go of leases whose memory was let go. Any thread, also inside a finalizer; 2 us at most for 512 structs."""
        # Never waits: a sweep that is left out is soon made up for, and the other sweep may be this very thread's, in a finalizer.
        # One call takes the lock and notes it, so no interrupt can come between the two.
        taken: list[bool] = []
        try:
            taken.extend(map(self._sweeping.acquire, (False,)))
            if taken[0]:
                self._sweep()
        finally:
            if taken and taken[0]:
                self._sweeping.release()

    def _sweep(self) -> None:
        while self._cut_off:
            self._clean_up(*self._cut_off[0])
        if len(self._live) <= ONE_BY_ONE * len(self._chunks):
            self._look_at_each()
            return
        for base, words in self._chunks:
            np.equal(words, self._mark_word, self._are_marked)
            if 1 in self._flags:
                self._let_go(base, words, self._are_marked.nonzero()[0])

    def _look_at_each(self) -> None:
        """Let go of those whose deleters were called. Looks only at the structs in use."""
        words, mark = self._words, self._mark
        # A copy, made in one call: other threads give out structs meanwhile. Of numbers, so that nothing here keeps a lease alive.
        for start in list(self._live):
            if words[start].value == mark:
                freed = map(_SLOT, map(self._live.pop, (start,)))
                # As in `_let_go`.
                words[start].value = BIAS
                self._free.extend(freed)

    def _take(self, taken: list[Slot]) -> None:
        """Enter a struct that is free."""
        while not taken:
            try:
                # One call, so that an interrupt comes before it or behind it.
                taken.extend(map(_POP, (self._free,)))
            except IndexError:
                self._grow()

    def _clean_up(self, taken: list[Slot], capsule: Any) -> None:
        """Let go of the lease of the oldest import that was cut off, if JAX has not taken the struct."""
        # A capsule that was imported has been renamed.
        if capsule is None or _is_valid(capsule, NAME):
            for slot in taken:
                self._live.pop(slot.start, None)
        # No call stands between the two, so no interrupt does.
        del self._cut_off[0]
        if capsule is None:
            # If the import failed, the deleter may still be called, at any time: such a struct is not used again.
            self._free.extend(taken)

    def _let_go(self, base: int, words: Words, numbers: np.ndarray[Any, Any]) -> None:
        starts = [base + number * NBYTES for number in numbers.tolist()]
        # None: the import failed, and the deleter was called all the same.
        freed = map(_SLOT, filter(None, map(self._live.pop, starts, itertools.repeat(None))))
        # No call stands between the two, so no interrupt and no other thread does. What is free may be given out again at once.
        words[numbers] = BIAS
        self._free.extend(freed)

    def _grow(self) -> None:
        nbytes = CHUNK * NBYTES
        base = self._allocate(nbytes + NBYTES)
        if base is None:
            raise MemoryError(f"no {nbytes} bytes for DLPack structs")
        start = -(-base // NBYTES) * NBYTES
        raw = memoryview((ctypes.c_uint8 * nbytes).from_address(start)).cast("B")
        words = np.frombuffer(raw, np.uint32)[:: NBYTES // 4]
        words[:] = BIAS
        slots = [Slot(start + number * NBYTES, raw, number) for number in range(CHUNK)]
        self._words.update([(slot.start, ctypes.c_uint32.from_address(slot.start)) for slot in slots])
        self._chunks.append((start, words))
        self._free.extend(slots)


@final
class Exporter:
    """What JAX imports: an object that lets `order` make JAX's stream wait (None: JAX has none), and hands over one capsule."""

    __slots__ = ("_capsule", "_device", "_order")

    def __init__(self, capsule: Any, device: tuple[int, int], order: Callable[[Any], None] | None) -> None:
        self._capsule = capsule
        self._device = device
        self._order = order

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if self._order is not None:
            self._order(stream)
        return self._capsule


@functools.lru_cache(maxsize=MOST_SHAPES)
def _lengths(shape: tuple[int, ...]) -> tuple[object, int]:
    """Return a shape as structs have it, and its address. Importers only read it, so structs of the same shape may share it."""
    lengths = (ctypes.c_int64 * len(shape))(*shape)
    return lengths, ctypes.addressof(lengths)


def capsules() -> Capsules:
    """Return this process's structs."""
    return _CAPSULES


def _unlocked_state(deleter: int) -> int:
    """Return what the deleter leaves behind, by asking it."""
    word = ctypes.c_uint32(BIAS)
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(deleter)(ctypes.addressof(word))
    if word.value not in (0, 1) or sys.byteorder != "little":
        raise OSError(f"pthread_spin_unlock left {word.value} in a lock on a {sys.byteorder}-endian machine, expected 0 or 1")
    return word.value


_CAPSULES = Capsules()
