"""What starts transfers, and what they return."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

PUTS, GETS, TRANSFER, STAGER, CHECKS, MAPPED = (
    f"xferlib/{name}.py" for name in ("h2d", "d2h", "transfer", "stager", "checks", "memory/mapped")
)

MUTANTS = [
    (STAGER, "        self._opened_at.warn(said, ResourceWarning, self)", "        user_line().warn(said, ResourceWarning, self)"),
    (STAGER, "steps.callback(stager._opened_at.warn,", "steps.callback(user_line().warn,"),
    (TRANSFER, "                self.done()\n                raise TransferError(f", "                raise TransferError(f"),
    (TRANSFER, "except (CapabilityError, TransferError):", "except CapabilityError:"),
    (PUTS, "            self._blocks.settle_posted()\n            leases +=", "            leases +="),
    (
        "xferlib/staging/pageable.py",
        "copies[-1], total, overwritten, target, pinned)",
        "copies[-1], total, overwritten, target)",
    ),
    (
        PUTS,
        "self._staging.stage(staged, nbytes, pinned",
        "self._staging.stage(staged, sum([one.array.nbytes for one in staged]), pinned",
    ),
    (
        "xferlib/ledger.py",
        "        if self.views.settle():\n            watch(self.views)\n        _open.pop(id(self), None)\n",
        "        _open.pop(id(self), None)\n        if self.views.settle():\n            watch(self.views)\n",
    ),
    (
        PUTS,
        "            if stream is not None:\n                self._backend.check_stream(stream)\n            streams: Streams = {}\n            block, target = self._blocks.lease(nbytes",
        "            streams: Streams = {}\n            block, target = self._blocks.lease(nbytes",
    ),
    (
        PUTS,
        "        if stream is not None:\n            self._backend.check_stream(stream)\n        streams: Streams = {}\n        block, lease = self._blocks.lease(packing",
        "        streams: Streams = {}\n        block, lease = self._blocks.lease(packing",
    ),
    (
        "xferlib/ledger.py",
        "return not self.jobs.d2h and not self.jobs.readings and not self.d2h.table and len(_open) == 1",
        "return not self.jobs.d2h and not self.jobs.readings and not self.d2h.table",
    ),
    (
        "xferlib/ledger.py",
        "return not self.jobs.d2h and not self.jobs.readings and not self.d2h.table and len(_open) == 1",
        "return not self.jobs.d2h and not self.jobs.readings and len(_open) == 1",
    ),
    (
        "xferlib/ledger.py",
        "return not self.jobs.d2h and not self.jobs.readings and not self.d2h.table and len(_open) == 1",
        "return not self.jobs.readings and not self.d2h.table and len(_open) == 1",
    ),
    (PUTS, "if event is not None and ledger.backend_device == self._ledger.backend_device:\n", "if event is not None:\n"),
    (
        PUTS,
        "self._lease_packed(sources, stream)\n            event",
        "self._lease_packed(sources, None)\n            event",
    ),
    (
        PUTS,
        "self._lease_packed(sources, stream)\n        staged",
        "self._lease_packed(sources, None)\n        staged",
    ),
    (
        PUTS,
        "                for target in overwritten:\n                    self._order_after_users(target)\n            event",
        "                self._order_after_users(overwritten[0])\n            event",
    ),
    (
        PUTS,
        "        for target in overwritten:\n            note_reader(target, stream, self._blocks)",
        "        note_reader(overwritten[0], stream, self._blocks)",
    ),
    (PUTS, "event = self._h2d.add(nbytes, (array,), overwritten)", "event = self._h2d.add(nbytes, (array,), ())"),
    (
        PUTS,
        "return self._h2d.add(nbytes, pinned, overwritten).event",
        "return self._h2d.add(nbytes, pinned[-1:], overwritten).event",
    ),
    (PUTS, "            self._h2d.quiesce(lease)\n", "            pass\n"),
    (
        PUTS,
        "            self._h2d.quiesce((pinned, target), pinned, overwritten)\n",
        "",
    ),
    (
        PUTS,
        "        except BaseException:\n            self._h2d.quiesce((pinned, leases), pinned)\n            raise",
        "        except BaseException:\n            raise",
    ),
    (
        PUTS,
        "            if len(made) == packing.count:\n                return unflatten(spec, made)\n",
        "            if made:\n                return unflatten(spec, made)\n",
    ),
    (PUTS, "for array, address in sources if address is None]) >= BORROW_FROM", "for array, address in sources]) >= BORROW_FROM"),
    (PUTS, "            elif address:\n                # Before", "            else:\n                # Before"),
    (PUTS, "until_started=leases, beside=pinned,", "until_started=leases[:1], beside=pinned,"),
    (
        PUTS,
        "            alike = target.shape == source.shape and target.dtype == source.dtype",
        "            alike = target.shape == source.shape",
    ),
    (PUTS, '        check_apart([(memory.address, memory.nbytes) for memory in overwritten], "into")\n', ""),
    (GETS, "self._d2h.quiesce((sources, outs), outs, sources)", "self._d2h.quiesce(outs)"),
    (GETS, "quiesce((source, out), (out,), (source,))", "quiesce((source, out))"),
    (PUTS, "quiesce((array, target), (array,), overwritten)", "quiesce((array, target), (), overwritten)"),
    (TRANSFER, "            self._make = None\n", "            pass\n"),
    (
        TRANSFER,
        "        refuse_bare_zero(stream)\n        if self._error is not None:\n            raise self._failed(self._error)\n",
        "        refuse_bare_zero(stream)\n",
    ),
    (
        TRANSFER,
        "        if waiting is not None and self._note_stream is not None:\n            self._note_stream(waiting.handle, waiting)",
        "        if waiting is not None and self._note_stream is not None and stream is not None:\n            self._note_stream(waiting.handle, waiting)",
    ),
    (
        TRANSFER,
        "        return self._arrays() if self._on_host else self.value",
        "        return self._arrays()",
    ),
    (
        GETS,
        "elif address:\n                copy(address, device_address, nbytes)",
        "else:\n                copy(address, device_address, nbytes)",
    ),
    (
        STAGER,
        "            self._ledger.reap()\n            self._staging.release()\n            self._pool.trim()",
        "            self._staging.release()\n            self._pool.trim()",
    ),
    (STAGER, "            self._pins.sweep()\n            self._ledger.reap()", "            self._ledger.reap()"),
    ("xferlib/resources.py", "        uninterrupted(self._give_back)", "        self._give_back()"),
    (STAGER, "            pinned_nbytes=locks * pool.pinned,", "            pinned_nbytes=locks * pool.used,"),
    (CHECKS, "        if following < start + nbytes:", "        if following <= start + nbytes:"),
    (GETS, "if outs is not None and len(outs) > 1:", "if outs is not None and len(outs) > 2:"),
    (CHECKS, "    if out.dtype != dtype:", "    if out.dtype.itemsize != dtype.itemsize:"),
    (
        MAPPED,
        "        for _, event in list(self._fenced.values()):\n            self._wait(event)\n",
        "        for _, event in list(self._fenced.values())[:1]:\n            self._wait(event)\n",
    ),
    (
        MAPPED,
        "            self._rows.pop(number, None)\n            self._returns.settled(number)",
        "            self._returns.settled(number)",
    ),
    (MAPPED, "            view, row.stream = backend", "            view, _ = backend"),
    (CHECKS, "    if not backend.capabilities.finalizers and collects():", "    if False:"),
    (
        PUTS,
        "            ledger.d2h.reap()\n        return not self._ledger.has_no_readers\n",
        "            pass\n        return True\n",
    ),
    (PUTS, "        return not self._ledger.has_no_readers\n", "        return False\n"),
]
