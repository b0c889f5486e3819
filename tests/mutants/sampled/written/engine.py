"""What is copied by the caller before the engine's threads come into it, and where these run."""

from __future__ import annotations

BOUNCE, STAGING, LANES = "xferlib/staging/bounce.py", "xferlib/staging/pageable.py", "xferlib/engine/lanes.py"
SMALL, COALESCE = "xferlib/staging/small_gets.py", "xferlib/staging/coalesce.py"
FOREIGN = "xferlib/memory/foreign.py"

MUTANTS = [
    (BOUNCE, " or (len(arrays) == 1 and is_foreign(arrays[0])):", ":"),
    (COALESCE, "arrays.append(_as_bytes(array) if array.flags.c_contiguous else array)", "arrays.append(_as_bytes(array))"),
    (COALESCE, "            foreign = True\n", ""),
    (FOREIGN, "base is not None and not (type(base) is np.ndarray and base.base is None)\n", "isinstance(base, np.memmap)\n"),
    (BOUNCE, "add(nbytes, pinned, overwritten,", "add(nbytes, pinned, (),"),
    (BOUNCE, "bisect_left(self._sizes, nbytes)", "bisect_left(self._sizes, nbytes + 1)"),
    (BOUNCE, "bisect_left(self._sizes, nbytes)", "bisect_left(self._sizes, nbytes - 1)"),
    (
        BOUNCE,
        "quiesce((target, pinned, fills[-1].memory if fills else None), pinned, overwritten)",
        "quiesce(fills[-1].memory if fills else None)",
    ),
    (STAGING, "            address += array.nbytes\n", ""),
    (STAGING, "if copy.nbytes <= self._split_nbytes or len(copy.arrays) > 1:", "if copy.nbytes <= self._split_nbytes:"),
    (STAGING, "nbytes > self._split_nbytes or nbytes > self._bounce_nbytes", "nbytes > self._split_nbytes"),
    (STAGING, "nbytes > self._split_nbytes or nbytes > self._bounce_nbytes", "nbytes > self._bounce_nbytes"),
    (LANES, "    if near is not None:\n", "    if near is not None and near.node < 0:\n"),
    (LANES, "min(count, len(near.cpus)), near.node,", "count, near.node,"),
    (LANES, "min(count, len(near.cpus)), near.node,", "min(count, len(near.cpus)), 0,"),
    (LANES, "    if library().xe_start(count) == 0:\n", "    if near is None and library().xe_start(count) == 0:\n"),
    (
        SMALL,
        "            return self._d2h.add(0, (), sources, block, reaped=True)",
        "            return self._d2h.add(0, (), sources, None, reaped=True)",
    ),
    (
        SMALL,
        "            return self._d2h.add(0, (), sources, block, reaped=True)",
        "            return self._d2h.add(0, (), (), block, reaped=True)",
    ),
    (SMALL, " and len(transfers) <= MOST_ARRAYS and ", " and "),
    (SMALL, "        if self._d2h.busy or not _comes(after, PRODUCER_SECONDS):", "        if self._d2h.busy:"),
    (SMALL, "        if self._d2h.busy or not _comes(after, PRODUCER_SECONDS):", "        if not _comes(after, PRODUCER_SECONDS):"),
    (SMALL, "            if not _comes(event, 0.0):", "            if False:"),
    (SMALL, "                let_go(self._d2h.table, event)\n", ""),
    (
        SMALL,
        "            return False\n        start += round_up(array.nbytes, ALIGNMENT)",
        "            return False\n        start += array.nbytes",
    ),
    (SMALL, "            self._idle.append((block, event))\n            return came", "            return came"),
    (SMALL, "            self._d2h.quiesce((block, sources), (), sources)\n", ""),
    (SMALL, "            self._jobs.add(fill)\n            try", "            try"),
    (SMALL, "            nbytes = min(nbytes, FEWER_NBYTES)\n", "            pass\n"),
    (SMALL, "        if pool.limit < KEPT_SHARE * nbytes:\n", "        if True:\n"),
    (SMALL, "        self._idle.clear()\n", ""),
    (SMALL, "        if found:\n            self._block = None\n", ""),
    (SMALL, "self._idle or self._is_there or not", "self._idle or not"),
    (SMALL, "if block is not None and not self._is_there:", "if block is not None:"),
    (SMALL, "                    self._missed += 1\n", "                    pass\n"),
    (SMALL, "        self._missed = 0\n        fill", "        fill"),
    (STAGING, " or self._small_gets.is_missed:", ":"),
    (SMALL, "pool.limit >= KEPT_SHARE * nbytes", "pool.limit > KEPT_SHARE * nbytes"),
    (SMALL, "        refuse_stream_wait()\n", "        return None\n"),
    (STAGING, "        if jobs.d2h or jobs.h2d or not", "        if jobs.d2h or not"),
    (STAGING, "        if jobs.d2h or jobs.h2d or not", "        if jobs.h2d or not"),
    (STAGING, "            jobs.reap()\n        if jobs", "            pass\n        if jobs"),
    (STAGING, "if not (small.takes(transfers) and self._lanes[D2H].has_chunks):", "if not small.takes(transfers):"),
    (STAGING, "            self._small_gets.prepare()\n", "            pass\n"),
    (STAGING, "self._bounce.release(), self._small_gets.release(), *", "self._bounce.release(), *"),
]
