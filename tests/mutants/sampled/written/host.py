"""The host backend."""

from __future__ import annotations

ENGINE, MEMORY, STAGER, STREAM, WORKER, OPENER = (
    f"backends/xferlib_host/{name}.py" for name in ("_engine", "_memory", "_stager", "_stream", "_worker", "__init__")
)

MUTANTS = [
    (ENGINE, "        if self._cause is not None:\n            return\n        try:", "        try:"),
    (
        ENGINE,
        "            self._cause = error\n",
        "            self._cause = self._cause or (error if isinstance(error, Exception) else None)\n",
    ),
    (ENGINE, "        self.submit(event.synchronize)\n", "        self._worker.put(event.done)\n"),
    (ENGINE, "event.reach(self._cause)", "event.reach(self._cause)\n        self._cause = None"),
    (MEMORY, "if sum(start < end and address < stop for", "if sum(start < end and address <= stop for"),
    (MEMORY, "if sum(start < end and address < stop for", "if sum(start <= address < stop for"),
    (MEMORY, "last = address + max(nbytes, 1) - 1", "last = address + nbytes"),
    (MEMORY, "if found is not None and last < found[0]:", "if found is not None:"),
    (
        MEMORY,
        "any(start <= end < stop for start, stop in ranges) for end in (address, last)",
        "any(start <= end < stop for start, stop in ranges) for end in (address,)",
    ),
    (MEMORY, "block = Block(-(-start // _ALIGNMENT) * _ALIGNMENT, nbytes)", "block = Block(start, nbytes)"),
    (MEMORY, '        found.memory.fill(_FREED)\n        self._counts["device_frees"].add()', "        found.memory.fill(_FREED)"),
    (MEMORY, "found is None or found.block is not block or self", "found is None or self"),
    (MEMORY, "        self._lease = lease", "        self._lease = None"),
    (MEMORY, "        found[1].close()\n", ""),
    (MEMORY, "            self._registered.pop(address, None)\n            raise taken", "            raise taken"),
    (STAGER, "array if array.flags.c_contiguous else _packed(array, on)", "np.ascontiguousarray(array)"),
    (
        STAGER,
        '        if not array.flags.writeable:\n            raise ValueError("the target is read-only',
        '        if array.size and not array.flags.writeable:\n            raise ValueError("the target is read-only',
    ),
    (
        STAGER,
        "        if on is not None:\n            self.h2d.wait(on.record())",
        "        if on is not None:\n            self.d2h.wait(on.record())",
    ),
    (
        STAGER,
        "        if len(events) > 1:\n            return AllEvents(events)\n        return events[0] if events else None",
        "        return events[-1] if events else None",
    ),
    (STAGER, "        self.h2d.close()\n        self.d2h.close()", "        self.h2d.close()"),
    (STAGER, "found = None if on is None else protocol.Stream(on.handle, on)", "found = None"),
    (STAGER, 'dtype.kind in "biufcmM"', 'dtype.kind in "biufc"'),
    (STREAM, "        return all(event.done() for event in self._events)", "        return self._events[-1].done()"),
    (STREAM, "        for event in self._events:\n            event.synchronize()", "        self._events[0].synchronize()"),
    (
        STREAM,
        "            if not self._failed:\n                self._failed.append(error)",
        "            self._failed.append(error)",
    ),
    (STREAM, "        if not event.done():\n            self._worker", "        self._worker"),
    (STREAM, "            return self._end  # It", "            return Event()  # It"),
    (STREAM, "stream = stack[-1]", "stream = stack[0]"),
    (WORKER, "        if first and last is not None:", "        if last is not None:"),
    (WORKER, "        del job  # What", "        # What"),
]
