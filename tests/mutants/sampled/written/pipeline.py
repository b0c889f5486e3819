"""Prefetch, drain, rings of slots, and what they say of themselves."""

from __future__ import annotations

RING, BACKGROUND, THREAD, PREFETCH, DRAIN, ENDS, STREAM, REPORT, CLOCK, BILL, ROWS, UNSHARED = (
    f"xferlib/pipeline/{name}.py"
    for name in (
        "ring",
        "background",
        "source_thread",
        "prefetch",
        "drain",
        "ends",
        "stream",
        "report",
        "phase_timer",
        "memory_estimate",
        "output_writer",
        "unshared",
    )
)

MUTANTS = [
    (RING, "        if self.slots > fit:", "        if self.slots >= fit:"),
    (
        RING,
        "        _freeze(leaves, block)\n        del self._tree\n        self.ring._in_flight(",
        "        del self._tree\n        self.ring._in_flight(",
    ),
    (RING, "        self.ring._in_flight(self._number, end_of(transfer))", "        self.ring._in_flight(self._number, transfer)"),
    (
        RING,
        "                # It reads no more. Whoever holds the transfer is told.\n                pass\n",
        "                # It reads no more. Whoever holds the transfer is told.\n                raise\n",
    ),
    (
        RING,
        "            with suppress(TransferError):\n                end.synchronize()\n            self._land",
        "            end.synchronize()\n            self._land",
    ),
    (RING, "            if self._idle or self._put or self._closed:", "            if self._idle or self._put:"),
    (RING, "[leaf[: self._rows] for leaf in leaves]", "[leaf[: self._rows] if self._rows else leaf for leaf in leaves]"),
    (RING, "        if rows is not None and not 0 <= rows <= room:", "        if rows is not None and not 0 < rows <= room:"),
    (RING, "room = min((len(leaf) if", "room = max((len(leaf) if"),
    (
        RING,
        "            self._land(number)\n            self._returns.post()",
        "            self._come_back(number)\n            self._returns.post()",
    ),
    (BACKGROUND, "        self._join()\n        raise StopIteration", "        raise StopIteration"),
    (
        BACKGROUND,
        "            ended = shared.ended\n            entry: T | Failed = _first(shared.items)",
        "            entry: T | Failed = _first(shared.items)\n            ended = shared.ended",
    ),
    (THREAD, "lambda: self.going() and len(self.items) < self.depth)", "lambda: self.going() and len(self.items) <= self.depth)"),
    (THREAD, "        if isinstance(iterator, GeneratorType):\n            iterator.close()\n", "        pass\n"),
    (THREAD, "        box = []\n", "        pass\n"),
    (PREFETCH, "        while len(self._recent) >= self._depth:", "        while len(self._recent) > self._depth:"),
    (
        PREFETCH,
        "        if in_place:\n",
        "        if in_place and self._depth > 1:\n",
    ),
    (PREFETCH, "        end = end_of(started)\n", "        end = started\n"),
    (
        PREFETCH,
        "        return any(self._is_pinned(leaf) for leaf in leaves if isinstance(leaf, np.ndarray))",
        "        return all(self._is_pinned(leaf) for leaf in leaves if isinstance(leaf, np.ndarray))",
    ),
    (PREFETCH, "            late=self._late - first.late,", "            late=self._late,"),
    (
        DRAIN,
        "        if error is not None and not (self._closed or self._ended):",
        "        if error is not None and not self._closed:",
    ),
    (BILL, "    if count * nbytes <= limit:", "    if count * nbytes < limit:"),
    (BILL, "    fit = limit // nbytes - BESIDE_DEPTH", "    fit = limit // nbytes"),
    (PREFETCH, "        self._puts.check_room(tree, self._depth, self._count)\n", ""),
    (PREFETCH, "sum(map(size_class, sizes))", "sum(sizes)"),
    (DRAIN, '        if self._stager.when_full != "stage":\n', "        if True:\n"),
    (
        DRAIN,
        "        except (XferError, TypeError, ValueError):\n            rows.filled -= count\n            raise",
        "        except (XferError, TypeError, ValueError):\n            raise",
    ),
    (DRAIN, "                failed = failed or error", "                failed = error"),
    (
        ENDS,
        "        users += ledger.jobs.using([(address, nbytes)])\n",
        "",
    ),
    (STREAM, "and self._drain.pending <= self._drain.depth:", "and self._drain.pending < self._drain.depth:"),
    (CLOCK, "        seconds = min(seconds, self._seconds.get(source, 0.0))\n", ""),
    (ROWS, "        if end > self.rows:", "        if end >= self.rows:"),
    (UNSHARED, "if count != _ALONE + owners or weakref.getweakrefcount(item):", "if count != _ALONE + owners:"),
    (UNSHARED, "if count != _ALONE + owners or", "if count > _ALONE + 1 or"),
    (UNSHARED, "item.flags.owndata or _is_base_unshared([item.base])", "item.flags.owndata or type(item.base) is np.ndarray"),
    (UNSHARED, "        return _counts(bases) == [_ALONE + 1]\n", "        return True\n"),
    (UNSHARED, "        return _counts(bases) == [_ALONE + 1]\n", "        return False\n"),
    (UNSHARED, "kind is np.ndarray and _are_unshared(bases, 1)", "_are_unshared(bases, 1)"),
    (UNSHARED, "kind is list or kind is tuple", "kind is list or isinstance(item, tuple)"),
    (UNSHARED, " or item is _EMPTY", ""),
    (UNSHARED, "if kind is dict else item), 1)", "if kind is dict else item), 2)"),
    (
        PREFETCH,
        "        unshared = is_unshared(box)\n        (batch,) = box\n",
        "        (batch,) = box\n        unshared = is_unshared(box)\n",
    ),
    (PREFETCH, "in_place = not unshared and self._puts.in_place(batch)", "in_place = not unshared"),
    (PREFETCH, "put(batch, unshared=unshared)", "put(batch, unshared=True)"),
]
