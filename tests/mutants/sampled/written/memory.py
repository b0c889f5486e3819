"""Pinned memory: the pool, what it is made of, and memory that callers pin."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

POOL, HOST, ARRAYS, BLOCKS, RANGES, LIMITS, PAGES, PROC_MAPS, NUMA = (
    f"xferlib/memory/{name}.py"
    for name in ("pinned_pool", "host", "arrays", "blocks", "ranges", "limits", "pages", "proc_maps", "numa")
)
REGISTERED, SEGMENTS = "xferlib/memory/registered.py", "xferlib/memory/segments.py"
LEDGER, RESOURCES = "xferlib/ledger.py", "xferlib/resources.py"

MUTANTS = [
    (PAGES, "step = max(few, _step(total))", "step = _step(total)"),
    (PAGES, "nbytes >= ROUNDED_FROM_NBYTES and lacking", "lacking"),
    (PAGES, "lacking <= HUGE // 4", "lacking < HUGE // 4"),
    (PAGES, "lacking <= HUGE // 4", "lacking <= HUGE // 2"),
    (PAGES, "            _unmap(address, _room(nbytes))", "            _unmap(address, nbytes)"),
    (PAGES, "total = sum(map(_room, sizes))", "total = sum(sizes)"),
    (PAGES, "few = -(-(total + sum(list(_of_process.values()))) //", "few = -(-total //"),
    (PAGES, "        _of_process.pop(address, None)\n", ""),
    (PAGES, "if min(sizes) >= HUGE else ours)", "if min(sizes) >= HUGE else zip(addresses, sizes, strict=True))"),
    (PAGES, "taken = sum([_room(nbytes) for", "taken = sum([nbytes for"),
    (POOL, "elif collected and waits and looks < MOST_LOOKS and self.", "elif False and self."),
    (POOL, " and self._segments.used_nbytes > self._segments.arrays_nbytes:\n", ":\n"),
    (POOL, "if size > self.limit // PAGE * PAGE:", "if size > self.limit:"),
    (POOL, "if size > self.limit // PAGE * PAGE:", "if size >= self.limit // PAGE * PAGE:"),
    (
        POOL,
        "            if excess <= 0:\n                self._growing[number]",
        "            if excess < 0:\n                self._growing[number]",
    ),
    (
        POOL,
        "self._segments.arrays_nbytes + nbytes <= self._arrays_limit",
        "self._segments.arrays_nbytes + nbytes < self._arrays_limit",
    ),
    (POOL, "limit - min(STAGING_NBYTES, limit // 2) if", "limit - STAGING_NBYTES if"),
    (
        SEGMENTS,
        "kinds = (self.large, self.small, self.write_combined, self.pageable)",
        "kinds = (self.large, self.small, self.pageable)",
    ),
    (
        POOL,
        "        segment.ranges.take_at(segment.start, request.size)\n        return self._hand_out(segment.start",
        "        start = segment.ranges.take(request.size)\n        assert start is not None\n        return self._hand_out(start",
    ),
    (
        POOL,
        "                # Refused: it is still there, and the next request or trim finds it.\n                self._restore(segment)\n",
        "",
    ),
    (POOL, "waits = not request.for_array or self.when_full", "waits = self.when_full"),
    (SEGMENTS, "            self.arrays_nbytes += size", "            self.arrays_nbytes += asked"),
    (SEGMENTS, " if not segments[whole[0]].claimed]", "]"),
    (SEGMENTS, "return index >= 0 and address + nbytes <= ends[index]", "return index >= 0 and address < ends[index]"),
    (
        POOL,
        "        if request.write_combined:\n            return",
        "        if request.write_combined and request.size >= LARGE_FROM_NBYTES:\n            return",
    ),
    (POOL, "                gc.collect()\n                collected = True", "                collected = True"),
    (RANGES, "if after is not None and end not in self.segments:", "if after is not None:"),
    (RANGES, "if before is not None and start not in self.segments:", "if before is not None:"),
    (
        RANGES,
        "        del self._end_to_start[end]\n        self._whole.pop(start, None)\n",
        "        del self._end_to_start[end]\n",
    ),
    (RANGES, "        self._whole.pop(start, None)\n        if size", "        if size"),
    (
        HOST,
        "            if nbytes > assumed:\n                found.append((leaf, self.address(leaf)))\n                continue\n",
        "",
    ),
    (HOST, "if len(leaves) >= FEW_LEAVES else", "if len(leaves) > FEW_LEAVES else"),
    (HOST, "if nbytes > assumed:", "if nbytes >= assumed:"),
    (
        HOST,
        "return list(map(self.address, arrays)) if found is None else [address for _, address in found]",
        "return list(map(self.address, arrays))",
    ),
    (HOST, "if type(base) is np.ndarray and base.base is None:", "if type(base) is np.ndarray:"),
    (HOST, " and not splits(address, nbytes) else None", " else None"),
    (HOST, "            if not array.flags.c_contiguous:\n                return None\n", ""),
    (ARRAYS, "step = max(1, nbytes // row_nbytes)", "step = -(-nbytes // row)"),
    (ARRAYS, "if array.nbytes <= nbytes or array.ndim == 0:", "if array.nbytes <= nbytes:"),
    (REGISTERED, "return after < len(ranges) and ranges[after][0] < end", "return after < len(ranges) and ranges[after][0] <= end"),
    (REGISTERED, "            self._opened_at.warn(said, ResourceWarning)", "            user_line().warn(said, ResourceWarning)"),
    (REGISTERED, "if after and ranges[after - 1][1] > address:", "if after and ranges[after - 1][1] >= address:"),
    (REGISTERED, "        self._ledger.wait_all()\n", ""),
    (REGISTERED, "        while wait_for_others(", "        while False and wait_for_others("),
    (REGISTERED, "        while wait_for_others(", "        if wait_for_others("),
    (REGISTERED, 'methodcaller("uses_host", row.address, row.nbytes)', 'methodcaller("uses_host", 0, 1 << 62)'),
    (REGISTERED, "        refuse_to_wait(self._ledger, uses)\n", ""),
    (REGISTERED, "lambda job: False", "lambda job: True"),
    (REGISTERED, "if views.held(row.address, row.nbytes) or ", "if "),
    (REGISTERED, " or views.readers(row.address, row.nbytes):", ":"),
    (REGISTERED, "        self._leaving[number] = None\n        self._ledger.wait_all()\n", "        self._ledger.wait_all()\n"),
    (REGISTERED, "            self._wait_for_others(row)\n\n", "\n"),
    (REGISTERED, "return self._open and not self._pins.closed", "return self._open"),
    (
        LEDGER,
        "if any(concerns(entry) for ledger in all_ledgers() if ledger is not own for",
        "if any(entry for ledger in all_ledgers() for",
    ),
    (RESOURCES, "                self.pins.wait_all()\n", "                pass\n"),
    (
        REGISTERED,
        "            if number in self._locks:\n                with translated",
        "            if True:\n                with translated",
    ),
    (PAGES, "    room = max(0, left - taken)", "    room = max(0, left)"),
    (PAGES, "    if nbytes > room:", "    if nbytes >= room:"),
]
