"""Prefetch, drain, rings of slots, and what they say of themselves."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

RING, FEED, PREFETCH, DRAIN, ENDS, STREAM, REPORT, CLOCK, BILL, ROWS = (
    f"xferlib/pipeline/{name}.py"
    for name in ("ring", "feed", "prefetch", "drain", "ends", "stream", "report", "clock", "bill", "rows")
)

MUTANTS = [
    (RING, "        if self.slots > fit:", "        if self.slots >= fit:"),
    (
        RING,
        "        _freeze(leaves)\n        del self._tree\n        self.ring._in_flight(lease, end_of(transfer))",
        "        del self._tree\n        self.ring._in_flight(lease, end_of(transfer))",
    ),
    (RING, "        self.ring._in_flight(lease, end_of(transfer))", "        self.ring._in_flight(lease, transfer)"),
    (
        RING,
        "            except TransferError:\n                # It reads no more. Who holds the transfer is told.\n                pass\n",
        "",
    ),
    (
        RING,
        "        with suppress(TransferError):\n            end.synchronize()\n        self._land",
        "        end.synchronize()\n        self._land",
    ),
    (RING, "            # For the next one who waits.\n            self._free.put(None)\n", ""),
    (RING, "[leaf[: self._rows] for leaf in leaves]", "[leaf[: self._rows] if self._rows else leaf for leaf in leaves]"),
    (RING, "        if rows is not None and not 0 <= rows <= room:", "        if rows is not None and not 0 < rows <= room:"),
    (RING, "room = min((len(leaf) if", "room = max((len(leaf) if"),
    (RING, "            self.ring._in_flight(held, under_way())", "            held.end()"),
    (
        FEED,
        "            if threading.current_thread() is not self._thread:\n                self._thread.join(CLOSE_SECONDS)\n            if entry.error is None",
        "            if entry.error is None",
    ),
    (
        FEED,
        "            self._shared.items.put(_End(None))\n            if threading",
        "            self._shared.items.put(entry)\n            if threading",
    ),
    (FEED, "        for _ in range(given - (self.depth - depth)):", "        for _ in range(given):"),
    (
        FEED,
        "            if token is _Token.PLACE or (self.hungry and self.items.empty()):",
        "            if token is _Token.PLACE or self.hungry:",
    ),
    (FEED, "        if isinstance(iterator, GeneratorType):\n            iterator.close()\n", "        pass\n"),
    (FEED, "            del item\n    finally", "    finally"),
    (PREFETCH, "        while len(self._recent) >= self._depth:", "        while len(self._recent) > self._depth:"),
    (
        PREFETCH,
        "        self._reading = end if in_place else None",
        "        self._reading = end if in_place and self._depth > 1 else None",
    ),
    (PREFETCH, "        end = end_of(started)\n", "        end = started\n"),
    (
        PREFETCH,
        "        return any(self._is_pinned(leaf) for leaf in leaves if isinstance(leaf, np.ndarray))",
        "        return all(self._is_pinned(leaf) for leaf in leaves if isinstance(leaf, np.ndarray))",
    ),
    (PREFETCH, "thread={part: max(0.0, seconds - before.get(part, 0.0)) for part, seconds in now.items()}", "thread=dict(now)"),
    (
        DRAIN,
        "            if not self._ended:\n                self._ended, self._error = True, error\n",
        "            self._ended, self._error = True, error\n",
    ),
    (DRAIN, "            fit = limit // nbytes - 1", "            fit = limit // nbytes"),
    (DRAIN, "                    error, self._error = self._error, None", "                    error = self._error"),
    (
        DRAIN,
        "            self._rows.filled += count\n            self._flying.append(transfer)",
        "            self._rows.filled += count",
    ),
    (
        ENDS,
        "        for end in self._left.copy():\n            with suppress(Exception):\n                end.synchronize()",
        "        with suppress(Exception):\n            for end in self._left.copy():\n                end.synchronize()",
    ),
    (STREAM, "self._drain = Drain(stager, depth + 1, out=out)", "self._drain = Drain(stager, depth, out=out)"),
    (STREAM, "                if self._waiting is None or not self._drain.pending:", "                if not self._drain.pending:"),
    (CLOCK, "        seconds = min(seconds, self._seconds.get(source, 0.0))\n", ""),
    (ROWS, "        if end > self.rows:", "        if end >= self.rows:"),
]
