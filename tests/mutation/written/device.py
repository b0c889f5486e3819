"""Device memory: blocks, leases, and when a block may be written again."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

DEVICE = "xferlib/device.py"

MUTANTS = [
    (DEVICE, old, new)
    for old, new in (
        (
            "            if stream.keepalive is None:\n                self._cache.end_now(self.block, self._streams)\n                return\n",
            "",
        ),
        ("        return self._nbytes - sum(self._dropped.copy())", "        return self._nbytes"),
        ("            if start <= target.address < end:", "            if start < target.address < end:"),
        ("            if start <= target.address < end:", "            if start <= target.address <= end:"),
        (
            "        with suppress(*self._backend.failures):\n            self._backend.sweep()\n        self._over",
            "        self._over",
        ),
        ("        self.end = lambda entry: dropped.append(entry[0].nbytes)", "        self.end = lambda entry: None"),
        ("        with self._lock:\n            self._shelve(ended, fenced)\n        self.trim()", "        self.trim()"),
        (
            "        # Copies that are done may hold the last reference to an array, and so to its block.\n        self._flow.reap()\n",
            "",
        ),
        ("or changes != self._changes or self.ended or self.fenced:", "or changes != self._changes:"),
        (
            "if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING:",
            "if behind > READERS_BEHIND and behind * size >= WORTH_WAITING:",
        ),
        (
            "if behind >= READERS_BEHIND and behind * size >= WORTH_WAITING:",
            "if behind >= READERS_BEHIND and behind * size > WORTH_WAITING:",
        ),
        (
            "                    with suppress(CapabilityError):\n                        return self._oldest(size), deque(), False",
            "                    return self._oldest(size), deque(), False",
        ),
        (
            "                victims = self._others(size, reached=True)\n",
            "                victims = self._others(size, reached=False)\n",
        ),
        ("            self._live.pop(block.address, None)\n            cell = ", "            cell = "),
        ("            cell.append(entry)\n", "            cell.appendleft(entry)\n"),
        ("            self._live.pop(block.address, None)\n            self._dropped.append", "            self._dropped.append"),
        (
            "            if not isinstance(error, self._backend.failures):\n                raise\n            return\n        fenced.append",
            "            return\n        fenced.append",
        ),
        ("        if fence is None and not self._backend.lost(block):", "        if fence is None:"),
        ("                lost = reached is None or self._backend.lost(block)", "                lost = self._backend.lost(block)"),
        (
            "                if lost:\n                    self._nbytes -= size\n                elif",
            "                if lost:\n                    pass\n                elif",
        ),
        ("            cell.extendleft(reversed(waiting))", "            cell.extendleft(waiting)"),
        ("self._nbytes + size > self.limit:", "self._nbytes + size >= self.limit:"),
        ("            self._backend.order_h2d(fence)\n            self.waits += 1\n", "            self.waits += 1\n"),
        (
            "                if excess > 0 and (not reached or self._reached(fence)):",
            "                if excess >= 0 and (not reached or self._reached(fence)):",
        ),
        ("        if excess > 0:\n            return deque()\n", ""),
        (
            "                with suppress(*self._backend.failures):\n                    fence.synchronize()\n",
            "                pass\n",
        ),
        ("            self._backend.order_h2d(block.ready)\n", ""),
        (
            "                self.trim()\n                return self._had(self._backend.alloc_device(size))\n",
            "                return self._had(self._backend.alloc_device(size))\n",
        ),
        (
            "            self._idle.setdefault(size, deque()).append((block, block.ready))",
            "            self._idle.setdefault(size, deque()).append((block, None))",
        ),
        ("    step = 1 << max(8, nbytes.bit_length() - 4)", "    step = 1 << max(8, nbytes.bit_length() - 3)"),
    )
]
