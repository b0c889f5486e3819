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
    only: str = ""
    """The backend that it is in; empty: every one."""


MUTANTS = (
    Mutant(
        "nothing is kept alive for a copy",
        "xferlib/inflight.py",
        "self._entries.append((event, keepalive, sources))",
        "self._entries.append((event, None, ()))",
    ),
    Mutant(
        "what a copy needs is let go of one transfer early",
        "xferlib/inflight.py",
        "gone = self._entries[:low]\n        del self._entries[:low]",
        "low = min(low + 1, len(self._entries))\n        gone = self._entries[:low]\n        del self._entries[:low]",
    ),
    Mutant(
        "a block is used again before its readers are done",
        "xferlib/device.py",
        "return fence is None or fence.done()",
        "return True",
    ),
    Mutant(
        "a stream that was named is not noted",
        "xferlib/transfer.py",
        "if waiting is not None and self._name is not None:",
        "if False:",
    ),
    Mutant(
        "leaves overlap in a shared block", "xferlib/layout.py", "max(1, -(-nbytes // ALIGNMENT))", "max(1, nbytes // ALIGNMENT)"
    ),
    Mutant(
        "only the first array of a block holds it",
        "xferlib/puts.py",
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
        "self._finished = self._event.done()",
        "self._finished = self._event.done() or True",
    ),
    Mutant(
        "pads are written between arrays of the caller's",
        "xferlib/puts.py",
        "self._begin([place.address for place in places], sources, places, pads=False)",
        "self._begin([place.address for place in places], sources, places, pads=True)",
    ),
    Mutant(
        "into does not wait for a get that reads", "xferlib/puts.py", "for read in self._d2h.readers(place):", "for read in ():"
    ),
    Mutant(
        "a pin is undone under a copy",
        "xferlib/pinning.py",
        "        self._traffic.wait_all()\n        with self._lock:\n            if address in",
        "        with self._lock:\n            if address in",
    ),
    Mutant("a hole between two pins is not seen", "xferlib/memory/host.py", "and not self._splits(address, nbytes)", ""),
    Mutant("a slot is handed out while its copy reads it", "xferlib/pipeline/ring.py", "if not end.done():", "if False:"),
    Mutant(
        "a view that is gone holds no memory",
        "xferlib/views.py",
        "self._fenced.append((memory, event))",
        "self._fenced.append((None, event))",
    ),
    Mutant("a chunk is filled while its copy reads it", "xferlib/staging/fill.py", "if chunk.busy is not None:", "if False:"),
    Mutant(
        "a job is over before its last part",
        "xferlib/staging/job.py",
        "            self._workers -= 1\n            if self._workers:\n                return\n        try:",
        "            self._workers -= 1\n        try:",
    ),
    Mutant("a lent block is free before its copies are started", "xferlib/puts.py", "until_started=leases", "until_started=None"),
    Mutant(
        "the source of a prefetch is asked too early",
        "xferlib/pipeline/prefetch.py",
        "return any(self._is_pinned(leaf)",
        "return False and any(self._is_pinned(leaf)",
    ),
    Mutant(
        "pinned memory is given back for less than was taken",
        "xferlib/memory/ranges.py",
        "if size > nbytes:\n            self._insert(start + nbytes, start + size)",
        "if size > nbytes:\n            self._insert(start + nbytes // 2 // 256 * 256, start + size)",
    ),
    Mutant(
        "results are written from the same row",
        "xferlib/pipeline/drain.py",
        "self._rows.filled += count",
        "self._rows.filled += count - (count > 1)",
    ),
    Mutant(
        "memory of a closed stager is unlocked under its arrays",
        "xferlib/memory/pool.py",
        "        self._closed = True\n        self.trim()",
        "        self._closed = True\n        [self._free(at) for part in (self._large, self._small) for at in part.segments]"
        "\n        self.trim()",
    ),
    Mutant(
        "close does not wait",
        "xferlib/stager.py",
        "            self._traffic.wait_all()\n            if self._closed:",
        "            if self._closed:",
    ),
    Mutant(
        "the order of a get is not its array's",
        "xferlib/gets.py",
        "sources.append(self._backend.as_source(leaf, stream))",
        "sources.append(self._backend.as_source(leaf, None))",
    ),
    Mutant(
        "an array is adopted at another place",
        "xferlib/puts.py",
        "arrays[index] = array\n        return unflatten(spec, arrays)",
        "arrays[index] = array\n        arrays[:2] = arrays[1::-1] if layout.count > 16 else arrays[:2]\n"
        "        return unflatten(spec, arrays)",
    ),
    Mutant(
        "tensors of a file are taken from another place",
        "xferlib/load.py",
        "raw[tensor.start : tensor.start + tensor.nbytes]",
        "raw[tensor.start // 512 * 512 : tensor.start // 512 * 512 + tensor.nbytes]",
    ),
)
