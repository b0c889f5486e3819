"""Batches that worker processes write."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

RUN, RING, SLOTS, POOL, WORKER, PROCESS, LAYOUT, MEMORY = (
    f"xferlib/pipeline/workers/{name}.py"
    for name in ("run", "shared_ring", "slots", "pool", "worker", "process", "layout", "memory")
)

MUTANTS = [
    (
        RUN,
        "        if isinstance(self._ended, StopIteration):\n            raise ClosedError(",
        "        if False:\n            raise ClosedError(",
    ),
    (RUN, "        self._again.sort(key=lambda task: task.number)\n", ""),
    (RUN, "        if tries <= self._retries:", "        if tries < self._retries:"),
    (RUN, "            self._slots.keep_only(self._pool.taken())\n", ""),
    (RUN, 'self._retries = retries if on_death == "replace" else 0', "self._retries = retries"),
    (
        RUN,
        "        if task.run != self._begin.run:\n            self._slots.give_back(task.slot)\n        elif",
        "        if task.run != self._begin.run:\n            pass\n        elif",
    ),
    (
        RUN,
        "        elif isinstance(reply, Raised):\n            self._slots.give_back(task.slot)\n",
        "        elif isinstance(reply, Raised):\n",
    ),
    (RUN, "            else:\n                self._slots.give_back(task.slot)\n        if lost", "        if lost"),
    (RUN, "        self._slots.give_back(lost.slot)\n        times", "        times"),
    (
        RUN,
        "                self._outcomes[self._taken] = error\n                self._taken += 1\n                return None",
        "                self._outcomes[self._taken] = error\n                return None",
    ),
    (
        RUN,
        "            if self._exhausted and self._given == self._taken:",
        "            if self._exhausted and not self._outcomes:",
    ),
    (RUN, "            # A copy may be done that nobody has asked about since.\n            reap_all()\n", ""),
    (RUN, "        if self._ended is None:\n            self._ended = reason", "        self._ended = reason"),
    (
        RUN,
        "                # An interrupt. If another one comes in here, the next step finds the pool torn.\n                self._mend()\n                raise",
        "                self._pool.torn = False\n                raise",
    ),
    (LAYOUT, "        if slots > fit:", "        if slots >= fit:"),
    (RING, "if self._pool.reentered or collects():", "if self._pool.reentered:"),
    (RING, "if self._pool.reentered or collects():", "if collects():"),
    (RING, "            self._closed = True\n", ""),
    (RING, "if not self._closed or self.memory is not None:", "if not self._closed:"),
    (POOL, "while not self._closed and len(self._workers) < count:", "while len(self._workers) < count:"),
    (POOL, "worker.terminate(EXIT_SECONDS) if worker in self._workers else None", "worker.terminate(EXIT_SECONDS)"),
    (RING, 'whole_number(slots, "slots", least=2)', 'whole_number(slots, "slots", least=1)'),
    (RING, "workers=min(workers, self.slots)", "workers=workers"),
    (WORKER, "beside = _put_beside(views, *before)", "beside = None"),
    (WORKER, "if value is None or isinstance(value, (int, np.integer)):", "if value is None:"),
    (
        WORKER,
        "if number >= len(arrays) or leaves[index] is not arrays[number]:",
        "if leaves[index] is not arrays[min(number, len(arrays) - 1)]:",
    ),
    (WORKER, "[paths[index] for index in places] != structure.paths():", "False:"),
    (RING, '        self._end_run(RuntimeError("a later', '        repr(RuntimeError("a later'),
    (SLOTS, "            if holder == FILLING and index not in taken:", "            if index not in taken:"),
    (
        SLOTS,
        "            if number in self._holders:\n                self._holders[self._holders.index(number)] = FREE\n",
        "            self._holders[number % len(self._holders)] = FREE\n",
    ),
    (
        SLOTS,
        "        return all(holder > FREE for holder in self._holders)",
        "        return all(holder != FREE for holder in self._holders)",
    ),
    (POOL, "        if worker.ready:\n            self._failed_starts = 0\n", ""),
    (
        POOL,
        "            if self._failed_starts >= MOST_FAILED_STARTS or (code is not None and code >= 0):",
        "            if self._failed_starts > MOST_FAILED_STARTS * MOST_FAILED_STARTS or (code is not None and code >= 0):",
    ),
    (POOL, "for worker in self._workers[:count] if worker.ready", "for worker in self._workers if worker.ready"),
    (
        POOL,
        "        lost = worker.assigned.popleft() if worker.assigned else None",
        "        lost = worker.assigned.pop() if worker.assigned else None",
    ),
    (WORKER, "        self._broken = None\n        try:", "        try:"),
    (WORKER, "type(pickle.loads(data)) is type(error)", "pickle.loads(data)"),
    (
        WORKER,
        "    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):",
        "    if not isinstance(error, Exception):",
    ),
    (PROCESS, "        if self._run != begin.run:\n", "        if self._run < 0:\n"),
    (LAYOUT, "        room = min((array.shape[0]", "        room = max((array.shape[0]"),
    (
        LAYOUT,
        "        if offset >= 0:\n            array.view(slot)\n            return array",
        "        array.view(slot)\n        return array",
    ),
    (MEMORY, "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW", "fcntl.F_SEAL_GROW"),
]
