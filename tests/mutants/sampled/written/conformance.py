"""The suite: what it asserts, what it is written with, and the hooks of the host backend."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

BASE, SUITE, MOVES, VALUES = (f"xferlib/conformance/{name}.py" for name in ("base", "suite", "moves", "values"))
GATES, WATCHDOG = "xferlib/gates.py", "xferlib/watchdog.py"
CLOSE, CONTENT, DONE, FAILURES, FLAGS, FREEDOM, MAPPED, ORDER, OVERLAP, PINNED, QUIET, REUSE = (
    f"xferlib/conformance/laws/{name}.py"
    for name in (
        "close",
        "content",
        "done",
        "failures",
        "flags",
        "freedom",
        "mapped_memory",
        "order",
        "overlap",
        "pinned",
        "quiet",
        "reuse",
    )
)
HOOKS = "backends/xferlib_host/conformance.py"

MUTANTS = [
    (BASE, '        assert blocked == 0, f"', '        assert blocked >= 0, f"'),
    (BASE, '            assert true(), "it came', '            assert true() or hold.held, "it came'),
    (BASE, "            if stager.stats().device_nbytes == taken:\n                self.assert_completes(kept[-1])\n", ""),
    (BASE, "        stager.put(others.copy()).result()\n        stager.get(arrays[0], out=results[0].copy()).result()\n", ""),
    (BASE, "            if required and (name is None or name in required):", "            if required and name in required:"),
    (
        SUITE,
        "    invented = sorted(name for name in dir(cls) if",
        "    invented = sorted(name for name in vars(StagerConformance) if",
    ),
    (SUITE, "if not reason.strip())", "if not reason)"),
    (SUITE, "    return marks if isinstance(marks, list) else [marks]", "    return marks if isinstance(marks, list) else []"),
    (GATES, "        self.open()\n        self._table.free.append", "        self._table.free.append"),
    (GATES, "        if self.shut:\n", "        if True:\n"),
    (VALUES, "    assert got.dtype == want.dtype\n", "    assert got.dtype.itemsize == want.dtype.itemsize\n"),
    (VALUES, "    assert got.shape == want.shape\n", "    assert got.size == want.size\n"),
    (VALUES, "(np.arange(251) * 7 + seed * 29)", "(np.arange(251) * 7 + seed * 251)"),
    (
        CLOSE,
        "        with self.hold_copies(stager.backend) as hold:\n            transfers = [stager.put(source), stager.get(array, out=pageable)]\n            raised",
        '        with self.hold_copies(stager.backend, "h2d") as hold:\n            transfers = [stager.put(source), stager.get(array, out=pageable)]\n            raised',
    ),
    (
        CLOSE,
        "        assert_same(transfers[1].value, values)\n        assert_same(pageable, values)\n",
        "        assert_same(transfers[1].value, values)\n",
    ),
    (CLOSE, "        assert stager.stats().device_nbytes == 0\n", ""),
    (
        CONTENT,
        "            assert_same(room, want)",
        "            assert_same(room[first : first + values.nbytes], want[first : first + values.nbytes])",
    ),
    (CONTENT, "        assert stager.stats().h2d_nbytes == 0", "        assert stager.stats().h2d_nbytes >= 0"),
    (CONTENT, "            stager.put(self.pinned(stager, words(2)), into=array).synchronize()\n", ""),
    (DONE, "        move.start().synchronize()\n", ""),
    (FAILURES, "        for question in (*questions, *questions):", "        for question in questions[:1]:"),
    (FAILURES, "        assert_same(before, move.values)\n", ""),
    (FLAGS, "            self.assert_stays_undone(transfer, hold)\n", ""),
    (
        FREEDOM,
        "            transfer = self.assert_returns(lambda: stager.put(source))\n            source[...] = words(2)",
        "            transfer = self.assert_returns(lambda: stager.put(source))",
    ),
    (MAPPED, "        while len(addresses) == len(set(addresses)):", "        while not addresses:"),
    (ORDER, "            assert memory is None or (memory == words(2)).all()\n", ""),
    (OVERLAP, "            assert not waiting.done()\n", ""),
    (QUIET, "            for _ in range(TRANSFERS):", "            for _ in range(TRANSFERS // 2):"),
    (QUIET, "        assert calls[-1] == 0, f", "        assert calls[-1] <= 2, f"),
    (REUSE, "            kept += self.put_others(stager, values, at_least=3)\n", ""),
    (
        HOOKS,
        "return not self._opened.is_set() and not any(ended.is_set() for ended in self._ended)",
        "return not self._opened.is_set()",
    ),
]
