"""What backends on CUDA need alike."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

CONTEXT, DRIVER, EVENTS, STREAMS, REFUSALS = (
    f"xferlib/cuda/{name}.py" for name in ("context", "driver", "fences", "streams", "refusals")
)

MUTANTS = [
    (CONTEXT, "            exchange(cell)\n            cells.append(cell)", "            cells.append(cell)"),
    (CONTEXT, "            cell = cells.pop()\n", "            cell = cells[-1]\n"),
    (
        CONTEXT,
        "            self.push()\n            return self.capture_mode.relaxed(call, *arguments)",
        "            self.push()\n            return call(*arguments)",
    ),
    (
        CONTEXT,
        "        try:\n            self.push()\n            return self.capture_mode.relaxed(call, *arguments)\n        finally:\n            self.pop()",
        "        self.push()\n        result = self.capture_mode.relaxed(call, *arguments)\n        self.pop()\n        return result",
    ),
    (
        CONTEXT,
        "                push()\n                return call(*arguments)",
        "                return call(*arguments)",
    ),
    (CONTEXT, "            library.cuCtxPushCurrent_v2(current)", "            pass"),
    (CONTEXT, "self._getpid() != self._pid or self._is_finalizing()", "self._is_finalizing()"),
    (CONTEXT, "        with suppress(self._errors):", "        with suppress(Exception):"),
    (CONTEXT, "            self.here(release, *arguments)", "            release(*arguments)"),
    (
        DRIVER,
        "        if status:\n            raise failure(name, status)",
        "        if status > 999:\n            raise failure(name, status)",
    ),
    (EVENTS, "stream = Stream(LEGACY, stream.keepalive)", "pass"),
    (EVENTS, "        if self.is_capturing(stream.handle):\n            return LaterEvent(stream, self)\n", ""),
    (EVENTS, "if self._event is None and not self._fences.is_capturing(self._stream.handle):", "if self._event is None:"),
    (EVENTS, "if self._event is None and not self._fences.is_capturing(", "if not self._fences.is_capturing("),
    (EVENTS, "return event is not None and event.done()", "return event is None or event.done()"),
    (EVENTS, "            return AllEvents(tuple(events), self)", "            return events[-1]"),
    (
        EVENTS,
        "        while left and left[-1].done():\n            left = left[:-1]",
        "        if left and left[-1].done():\n            left = ()",
    ),
    (EVENTS, "        return not left\n", "        return len(left) < 2\n"),
    (EVENTS, "        self._left = left\n        return", "        return"),
    (
        EVENTS,
        "        for event in self._left:\n            event.enqueue_wait(wait, handle)",
        "        self._left[0].enqueue_wait(wait, handle)",
    ),
    (EVENTS, "        for event in self._left:\n            event.synchronize()", "        self._left[-1].synchronize()"),
    (STREAMS, " and not isinstance(stream, bool)", ""),
    (STREAMS, "        if stream > 0:", "        if stream >= 0:"),
    (STREAMS, "version != 0 or ", ""),
    (STREAMS, " or isinstance(number, str | float)", ""),
    (STREAMS, " or handle < 0", ""),
    (STREAMS, "protocol() if callable(protocol) else protocol", "protocol()"),
    (REFUSALS, "if _visible() else", "if not _visible() else"),
    (REFUSALS, "if count == 1 else", "if count == 0 else"),
]
