"""Traces: what is recorded, to which cause a gap is put down, and what is written."""

from __future__ import annotations

GAPS, SUMMARY, GPU, LOG, ROWS, PAGE, RECORDS, TRACE, MAIN = (
    f"xferlib/tracing/{name}.py" for name in ("gaps", "summary", "gpu", "log", "rows", "page", "records", "trace", "__main__")
)
SOURCE, HOST_ENGINE = "xferlib/pipeline/source_thread.py", "backends/xferlib_host/_engine.py"

MUTANTS = [
    (GAPS, "event.start <= start and event.end <= end]", "event.end <= end]"),
    (GAPS, "event.start <= start and event.end <= end]", "event.start <= start]"),
    (GAPS, "*blocking) if event.site]", "*blocking)]"),
    (GAPS, "Lengths(without(self._kernels, times))", "Lengths(self._kernels)"),
    (GAPS, "inside(copy.issued, copy.start) > held / 2:", "inside(copy.issued, copy.start) > 0:"),
    (GAPS, 'return "source" if self._was_awaited(copy, start) else "late"', 'return "late"'),
    (GAPS, "return number > 0 and given[number - 1] > start", "return number > 0"),
    (GAPS, "number = bisect_right(given, copy.issued or copy.start)", "number = len(given)"),
    (GAPS, "number = bisect_right(given, copy.issued or copy.start)", "number = bisect_right(given, copy.issued)"),
    (GAPS, 'if copy.site and copy.kind == "h2d" else', 'if copy.kind == "h2d" else'),
    (GAPS, 'if copy.site and copy.kind == "h2d" else', "if copy.site else"),
    (GAPS, '"" if cause == "source" else kind', "kind"),
    (SOURCE, "max(asked, min(waiting))", "asked"),
    (SOURCE, "max(asked, min(waiting))", "min(waiting)"),
    (SOURCE, "        if waiting and not self.items:\n", "        if waiting:\n"),
    (SOURCE, "asked = perf_counter_ns() if LOG.on else 0", "asked = perf_counter_ns()"),
    (SOURCE, "                if asked:\n                    shared.note_source(asked)\n", "                pass\n"),
    (MAIN, "if begin.came or _is_of_program(error):", "if _is_of_program(error):"),
    (MAIN, "if begin.came or _is_of_program(error):", "if begin.came:"),
    (HOST_ENGINE, 'nbytes, "", site, issued)', 'nbytes, "pinned", site, issued)'),
    (SUMMARY, "hidden=under / length(busy) if busy", "hidden=under / length(kernels) if busy"),
    (
        SUMMARY,
        '    kernels = union((event.start, event.end) for event in events if event.kind == "kernel")\n    grouped',
        '    kernels = sorted((event.start, event.end) for event in events if event.kind == "kernel")\n    grouped',
    ),
    (SUMMARY, 'self.cause not in ("link", "short")', "True"),
    (GAPS, "        return without(left, [(event.start, event.end)])", "        return left"),
    (GPU, "            self.abandon()\n            raise", "            raise"),
    (GPU, 'if event.kind == "issue"}', 'if event.kind == "wait"}'),
    (GPU, 'target if event.kind == "h2d" else source', 'source if event.kind == "h2d" else target'),
    (GPU, "        decref(ctypes.c_void_p(address))\n", ""),
    (GPU, "            del os.environ[NVTX]\n", ""),
    (GPU, "            engine.xe_activity_drop()\n", ""),
    (RECORDS, "if 0 < activity.start <= activity.end:", "if True:"),
    (RECORDS, "            check_size(kind, len(record))\n", ""),
    (LOG, "for frame in passed]) or self.served_at(get_native_id())", "for frame in passed])"),
    (LOG, "any(start <= address < start + nbytes for", "any(start == address for"),
    (LOG, "        os.register_at_fork(after_in_child=self.stop)\n", ""),
    (ROWS, "nbytes=last.nbytes + mark.nbytes", "nbytes=last.nbytes"),
    (ROWS, "if lane[-1].end <= mark.start:", "if True:"),
    (PAGE, '        text = text.replace("<", "\\\\u003c")\n', ""),
    (PAGE, "len(text) <= room or max(marks, default=0) <= 1", "True"),
    (TRACE, "            if os.getpid() != self._process:\n                return  # It is the parent's.\n", ""),
    (TRACE, "            atexit.register(self._end_at_exit)\n", ""),
    (TRACE, "            if not self._fate:\n", "            if False:\n"),
    (
        TRACE,
        "                with self._termination.later():\n                    # No",
        "                if True:\n                    # No",
    ),
    (TRACE, "        while _running.get(None) is self and monotonic() < until:", "        while False:"),
    (TRACE, "        if self._fate.setdefault(None, me) is not me:", "        if self._fate.setdefault(None, me) is DROPPED:"),
    (TRACE, "if event.end >= start]", "]"),
]
