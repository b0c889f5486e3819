"""Defects to be planted: what the programs must find. Text of the library, and what stands there instead.

A mutant whose text is gone says so: give it the text that does the same now, or take it out.
"""

from __future__ import annotations

from typing import NamedTuple, final

__all__ = ["MUTANTS", "Mutant"]


@final
class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    only: tuple[str, ...] = ()
    """The backends that it shows in; empty: every one."""
    large: bool = False
    """Whether it is for programs of large arrays to find."""


MUTANTS = (
    Mutant(
        "nothing is kept alive for a copy",
        "xferlib/in_flight.py",
        "_NEW(Entry, (asked, event, self._count(), host_arrays, device_ranges, keepalive))",
        "_NEW(Entry, (asked, event, self._count(), (), (), None))",
    ),
    Mutant(
        "what a copy needs is let go of one transfer early",
        "xferlib/in_flight.py",
        "gone = entries = self._done(newest)",
        "gone = entries = self.entries()[: len(self._done(newest)) + 1]",
    ),
    Mutant(
        "whoever waits for one copy lets go of a later one",
        "xferlib/in_flight.py",
        "if entry is not None and entry.event is event:",
        "if entry is not None:",
    ),
    Mutant(
        "a block is used again before its readers are done",
        "xferlib/memory/device_pool.py",
        "            reached = fence.done()",
        "            reached = True",
    ),
    Mutant(
        "a stream that was named is not noted",
        "xferlib/transfer.py",
        "if waiting is not None and self._note_stream is not None:",
        "if False:",
    ),
    Mutant(
        "leaves overlap in a shared block", "xferlib/packing.py", "max(1, -(-nbytes // ALIGNMENT))", "max(1, nbytes // ALIGNMENT)"
    ),
    Mutant(
        "only the first array of a block holds it",
        "xferlib/h2d.py",
        "make(block, offset, shape, dtype, after=after, lease=lease)",
        "make(block, offset, shape, dtype, after=after, lease=lease if not offset else None)",
    ),
    Mutant(
        "value of a put does not wait",
        "xferlib/transfer.py",
        "        else:\n            self.stream_wait()\n        return self._arrays()",
        "        return self._arrays()",
    ),
    Mutant(
        "value of a get does not wait",
        "xferlib/transfer.py",
        "        if self._on_host:\n            self.synchronize()\n        else:",
        "        if self._on_host:\n            pass\n        else:",
    ),
    Mutant(
        "done says yes early",
        "xferlib/transfer.py",
        "            finished = self._event.done()\n",
        "            finished = self._event.done() or True\n",
    ),
    Mutant(
        "an array and its memory die together in a cycle",
        "xferlib/tickets.py",
        "    hidden: Any = _EMPTY((), _OBJECT)\n    hidden[()] = told\n    return hidden",
        "    return [told]",
        # NumPy's arrays hide what they hold from the collector, but half of the programs on the host have some that do not.
        # JAX's hold nothing of ours.
        ("host", "cupy", "numba"),
    ),
    Mutant("leaves that lie side by side are one", "xferlib/staging/coalesce.py", "block != last or ", ""),
    Mutant(
        "into does not wait for a get that reads",
        "xferlib/h2d.py",
        "                if not entry.uses_device(target):\n",
        "                if True:\n",
    ),
    Mutant(
        "into does not wait for a get of another stager's",
        "xferlib/h2d.py",
        "        for ledger in all_ledgers():\n            ledger.jobs.wait_issued",
        "        for ledger in (self._ledger,):\n            ledger.jobs.wait_issued",
    ),
    Mutant(
        "a slot is handed out while another stager reads it",
        "xferlib/pipeline/memory_users.py",
        "users += [entry.event.done for entry in ledger.entries() if entry.uses_host(address, nbytes)]",
        "users += []",
    ),
    Mutant(
        "a slot is handed out under a view of it",
        "xferlib/pipeline/memory_users.py",
        "if views.held(address, nbytes):",
        "if False:",
    ),
    Mutant(
        "a slot is handed out while work on a view of it goes on",
        "xferlib/pipeline/memory_users.py",
        "users += [event.done for event in views.readers(address, nbytes)]",
        "users += []",
    ),
    Mutant(
        "arrays are read in C order, however they lie",
        "backends/xferlib_jax/_exports.py",
        "None if in_order or expected == 0 else",
        "None if True else",
        ("jax",),
    ),
    Mutant(
        "a pin is undone under a copy",
        "xferlib/memory/registered.py",
        "        self._ledger.wait_all()\n        self._wait",
        "        self._wait",
    ),
    Mutant("a hole between two pins is not seen", "xferlib/memory/host.py", "and not splits(address, nbytes)", ""),
    Mutant(
        "a view that is gone holds no memory",
        "xferlib/memory/mapped.py",
        "self._fenced[number] = (view.memory, event)",
        "pass",
    ),
    Mutant(
        "the memory of a small get is free before its copy has come",
        "xferlib/staging/small_gets.py",
        "self._d2h.add(0, (), sources, block, reaped=True)",
        "self._d2h.add(0, (), sources, None, reaped=True)",
    ),
    Mutant("a lent block is free before its copies are started", "xferlib/h2d.py", "until_started=leases", "until_started=None"),
    Mutant(
        "the source of a prefetch is asked too early",
        "xferlib/pipeline/prefetch.py",
        "return any(self._is_pinned(leaf)",
        "return False and any(self._is_pinned(leaf)",
    ),
    Mutant(
        "a batch is borrowed that its source refers to",
        "xferlib/pipeline/unshared.py",
        "return _IS_COUNTED and _are_unshared(box, 0)",
        "return type(box[0]) in (np.ndarray, dict, list, tuple)",
    ),
    Mutant(
        "pinned memory is given back for less than was taken",
        "xferlib/memory/ranges.py",
        "        if size > nbytes:\n",
        "        if size > nbytes:\n            nbytes = nbytes // 2 // 256 * 256\n",
    ),
    Mutant(
        "results are written from the same row",
        "xferlib/pipeline/drain.py",
        "writer.filled += count\n",
        "writer.filled += count - (count > 1)\n",
    ),
    Mutant(
        "memory of a closed stager is unlocked under its arrays",
        "xferlib/memory/pinned_pool.py",
        "        try:\n            self._trim()\n        except BaseException:\n            # The caller is told",
        "        self._segments.rows.clear()\n        self._torn = True\n"
        "        try:\n            self._trim()\n        except BaseException:\n            # The caller is told",
    ),
    Mutant(
        "close does not wait",
        "xferlib/resources.py",
        "            self.ledger.wait_all()\n",
        "            pass\n",
    ),
    Mutant(
        "the order of a get is not its array's",
        "xferlib/d2h.py",
        "sources.append(place(leaf, stream))",
        "sources.append(place(leaf, None))",
    ),
    Mutant(
        "the order of a get of one array is not its array's",
        "xferlib/d2h.py",
        "source = self._backend.as_source(array, stream)",
        "source = self._backend.as_source(array, None)",
    ),
    Mutant(
        "memory that is locked later is not held to the limit",
        "xferlib/memory/pinned_pool.py",
        "room = fits and self.nbytes + total + STAGING_NBYTES <= self.limit",
        "room = fits",
        large=True,
    ),
    Mutant(
        "parts of large pinned memory are mapped over the second",
        "xferlib/memory/pages.py",
        "yield address + offset, min(step, nbytes - offset)",
        "yield address + min(step, offset), min(step, nbytes - offset)",
        large=True,
    ),
    Mutant(
        "an array is adopted at another place",
        "xferlib/h2d.py",
        "arrays[index] = array\n        return unflatten(spec, arrays)",
        "arrays[index] = array\n        arrays[:2] = arrays[1::-1] if packing.count > 16 else arrays[:2]\n"
        "        return unflatten(spec, arrays)",
    ),
    Mutant(
        "tensors of a file are taken from another place",
        "xferlib/files/readers.py",
        "self.all()[start : start + nbytes]",
        "self.all()[start // 512 * 512 : start // 512 * 512 + nbytes]",
    ),
)
