"""What is in flight: what is let go of, and what the look costs."""

from __future__ import annotations

INFLIGHT, LEDGER, PENDING = "xferlib/in_flight.py", "xferlib/ledger.py", "xferlib/pending.py"

MUTANTS = [
    # What is not done is let go of.
    (INFLIGHT, "if len(entries) < FEW or entries[FEW - 1] is not known:", "if len(entries) < FEW:"),
    (INFLIGHT, "if len(entries) < FEW or entries[FEW - 1] is not known:", "if entries[FEW - 1] is not known:"),
    (INFLIGHT, "entries[: self._first_pending(entries, FEW, near)]", "entries[:near]"),
    (INFLIGHT, "max(map(_RECORDED, entries[:-1])) > last.asked", "False"),
    (INFLIGHT, "if entry is last or entry.recorded < last.asked]", "if entry is last or entry.asked < last.asked]"),
    # Two threads that wait for each other, or memory that is unlocked under a copy.
    (PENDING, " and not (fills and isinstance(work, Fill))", ""),
    (PENDING, "if work.owner != me]", "if work.owner != me and not isinstance(work, Fill)]"),
    # A finalizer waits for the thread that it runs on.
    (LEDGER, "        if is_copy_thread():\n            return False\n", ""),
    (LEDGER, "others = [] if is_copy_thread() else [", "others = ["),
    # What a failed start has left under way is used, and nobody knows.
    (INFLIGHT, "event = self.add(0, host_arrays, device_ranges, keepalive)", "event = self.add(0, (), (), keepalive)"),
    (INFLIGHT, "            self.add(0, host_arrays, device_ranges, keepalive)", "            self.add(0, (), (), keepalive)"),
    # What is done is held.
    (INFLIGHT, "return gone, gone is not entries", "return gone, False"),
    (INFLIGHT, "near + 1, len(entries))", "near + 1, near + 1)"),
    (INFLIGHT, "min(len(entries), FEW - 1))", "1)"),
    # The driver is asked too often, or hundreds of entries are listed.
    (INFLIGHT, "        if len(entries) < FEW or not self._ended(entries[-1]):\n", "        if len(entries) < FEW:\n"),
    (INFLIGHT, "if near < len(entries) and self._ended(entries[near]):", "if False:"),
    (INFLIGHT, "entries = self._oldest(FEW)", "entries = self.entries()"),
    (INFLIGHT, "entries[-1].asked == newest", "False"),
    (INFLIGHT, "self.reap(newest=asked)\n", "self.reap()\n"),
    (INFLIGHT, "            entries.pop()\n        # Mostly", "            entries.clear()\n        # Mostly"),
    (INFLIGHT, "not reaped) or asked % _TURN >= _TURN - 2", "not reaped) or len(self.table) % REAP_EVERY_TRANSFERS == 0"),
    (INFLIGHT, "gone, more = self._take_done(newest)", "gone, more = self._take_done(newest)[0], True"),
    # Nobody waits for what another stager's jobs use.
    (LEDGER, " or ledger.jobs.wait_user(job_concerns)\n", "\n"),
    (PENDING, "if not isinstance(work, Fill) and uses_it(work):", "if not isinstance(work, Fill):"),
    ("xferlib/debug.py", "{OF_ANOTHER if only_dropped else ''}", ""),
    ("xferlib/debug.py", "{OF_ANOTHER if only_dropped else ''}", "{OF_ANOTHER}"),
    ("xferlib/callers.py", 'in ("xferlib", "contextlib")', '== "xferlib"'),
    # Another thread adds meanwhile.
    (INFLIGHT, "        except RuntimeError:\n            # Another", "        except ZeroDivisionError:\n            # Another"),
]
