"""Device memory: blocks, leases, and when a block may be written again; tickets, and the thread that settles what is left."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

DEVICE, TICKETS, REAPER = "xferlib/memory/device_pool.py", "xferlib/tickets.py", "xferlib/reaper.py"
TABLE = "xferlib/memory/table.py"

MUTANTS = [
    (
        DEVICE,
        "return sum([row.nbytes for row in list(self._rows.values())]) + sum(list(self._growing.values()))",
        "return sum([row.nbytes for row in list(self._rows.values())])",
    ),
    (DEVICE, "            if self.settle():\n                watch(self)\n", "            self.settle()\n"),
    (DEVICE, "        return bool(self._rows or self._growing)", "        return bool(self._leased)"),
    (TABLE, "                if torn:\n                    self._mend()\n", ""),
    (
        DEVICE,
        "                if torn or not self._nothing_new():\n",
        "                if not self._nothing_new():\n",
    ),
    (
        DEVICE,
        "            if row.doomed:\n                self._doomed.append(row)\n                continue\n",
        "            if row.doomed:\n                continue\n",
    ),
    (DEVICE, "                if self._places.get(row.address) is row:\n                    del self._places[row.address]\n", ""),
    (DEVICE, "            if row is not None and row.lease == number:", "            if row is not None:"),
    (DEVICE, "                self._allocating[number] = False\n", "                pass\n"),
    (DEVICE, "        if row.fence is None and (streams or not doomed):", "        if row.fence is None:"),
    (DEVICE, "                elif reached:\n", "                elif True:\n"),
    (DEVICE, "            if reached and not self._lost(row.block):", "            if reached:"),
    (DEVICE, "            if reached and not self._lost(row.block):", "            if not self._lost(row.block):"),
    (DEVICE, "told if row is first else self._reached(row.fence)", "self._reached(row.fence)"),
    (DEVICE, "told if row is first else self._reached(row.fence)", "told"),
    (
        DEVICE,
        "        row.fence, row.lease, row.streams = None, number, streams\n        self",
        "        row.lease, row.streams = number, streams\n        self",
    ),
    (DEVICE, "                    break\n        return None\n", "                    pass\n        return None\n"),
    (DEVICE, "list(row.streams.values()), tuple(row.streams)\n", "list(row.streams.values()), _NOBODY\n"),
    (
        DEVICE,
        "                row.fence = self._retire(streams)",
        "                row.fence = self._retire(streams[:1])",
    ),
    (
        DEVICE,
        "        row.lease, row.readers, row.streams, row.since = None, readers, {}, self._changes",
        "        row.lease, row.readers, row.since = None, readers, self._changes",
    ),
    (
        DEVICE,
        "        # Copies that are done may hold the last reference to an array, and so to its block.\n        self._reclaimer.reap()\n",
        "",
    ),
    (DEVICE, "elif changes != self._changes or self._returns:", "elif changes != self._changes:"),
    (
        DEVICE,
        "if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING:",
        "if behind > READERS_BEHIND and behind * size >= WORTH_WAITING:",
    ),
    (
        DEVICE,
        "if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING:",
        "if behind >= READERS_BEHIND and behind * size > WORTH_WAITING:",
    ),
    (
        DEVICE,
        "            with suppress(CapabilityError):\n                return self._oldest(size, number, streams), False",
        "            return self._oldest(size, number, streams), False",
    ),
    (DEVICE, "self._doom_others(size, reached=True)", "self._doom_others(size, reached=False)"),
    (DEVICE, "            if reached is None or self._lost(row.block):", "            if self._lost(row.block):"),
    (
        DEVICE,
        "                row.fence = None\n                row.lease",
        "                row.lease",
    ),
    (DEVICE, "            if not rows:\n                continue\n", "            if not rows:\n                break\n"),
    (
        DEVICE,
        "            for readers in [readers for readers, rows in self.behind.items() if not rows]:\n                del self.behind[readers]\n",
        "",
    ),
    (DEVICE, "                elif readers:\n", "                else:\n"),
    (DEVICE, "                elif readers:\n", "                elif not readers:\n"),
    (DEVICE, "min([group[0] for group in", "max([group[0] for group in"),
    (DEVICE, "min([group[0] for group in", "min([group[-1] for group in"),
    (DEVICE, "row.streams, row.since = None, readers, {}, self._changes", "row.streams = None, readers, {}"),
    (DEVICE, "            self.behind[row.readers] = deque((row,))", "            self.behind[row.readers] = deque()"),
    (
        DEVICE,
        "            self._backend.order_h2d(row.fence)\n            self.waits += 1\n",
        "            self.waits += 1\n",
    ),
    (DEVICE, "self.nbytes + size > self.limit:", "self.nbytes + size >= self.limit:"),
    (
        DEVICE,
        "                if excess > 0 and (not reached or self._reached(row.fence)):",
        "                if excess >= 0 and (not reached or self._reached(row.fence)):",
    ),
    (DEVICE, "        if excess > 0:\n            return False\n", ""),
    (DEVICE, "                if row.fence is not None:\n                    row.fence.synchronize()\n", "                pass\n"),
    (
        DEVICE,
        "                self._growing.pop(number, None)\n                self._changes += 1\n                if not",
        "                if not",
    ),
    (DEVICE, "            # Idle blocks of other sizes may be all that stands in the way.\n            self._trim()\n", ""),
    (DEVICE, "    power = nbytes.bit_length() - 4", "    power = nbytes.bit_length() - 3"),
    (TICKETS, "return not self._posted.empty() or bool(self._unsettled)", "return not self._posted.empty()"),
    (REAPER, "    if _over or get_ident() != _main or collects():\n        return call()\n", "    return call()\n"),
    (DEVICE, "min(behind, SPARES, SPARE_NBYTES // size)", "min(SPARES, SPARE_NBYTES // size)"),
    (DEVICE, "min(behind, SPARES, SPARE_NBYTES // size)", "min(behind, SPARES)"),
    (
        DEVICE,
        "min(behind, SPARES, SPARE_NBYTES // size)",
        "min(behind, SPARE_NBYTES // size)",
    ),
    (
        DEVICE,
        "            if not self._alone(self._reserve_spare, size, number):\n                return False\n",
        "            self._alone(self._reserve_spare, size, number)\n",
    ),
    (DEVICE, "                if behind:\n", "                if True:\n"),
    (DEVICE, "                if behind:\n", "                if False:\n"),
    (DEVICE, "        if attempts < min(SPARES, SPARE_NBYTES // size):", "        if attempts < SPARES:"),
    (DEVICE, "        if attempts < min(SPARES, SPARE_NBYTES // size):", "        if attempts < SPARE_NBYTES // size:"),
    (
        DEVICE,
        "            with suppress(Exception):\n                uninterrupted",
        "            with suppress(*self._failures):\n                uninterrupted",
    ),
    (
        DEVICE,
        "            with suppress(Exception):\n                uninterrupted(lambda: self._add_spare(size))",
        "            with suppress(Exception):\n                self._add_spare(size)",
    ),
    (DEVICE, "        return not self._closed and self._reserve(size, number)", "        return self._reserve(size, number)"),
    (DEVICE, "        self._late.clear()\n", ""),
    (
        DEVICE,
        "        # Whoever finds no room because of it waits until it is there.\n        with self._at_work:",
        "        if True:",
    ),
    (TABLE, "                if torn or not self._nothing_new():\n", "                if not self._nothing_new():\n"),
    (TABLE, "                torn, self._torn = self._torn, True\n", "                torn = self._torn\n"),
    (TABLE, "                self._torn = False\n", ""),
    (TABLE, "                self._sweep()\n", ""),
    (TABLE, "            if self._inside:\n                self._refuse()\n", ""),
    (TABLE, "            finally:\n                self._inside = False\n", "            finally:\n                pass\n"),
    (TABLE, "return self._inside and self._lock._is_owned()", "return self._inside"),
    (TABLE, "        self._inside = False\n        self._returns", "        self._returns"),
]
