"""The JAX backend as far as it runs on the CPU."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

(
    CPU,
    ENGINE,
    PROMISE,
    READING,
    MEMORY,
    ARRAYS,
    SHARDED,
    SPREAD,
    STAGERS,
    PREFETCH,
    GATHER,
    IMPORTS,
    UNPACK,
    CAPSULE,
    COPIES,
    SAVE,
) = (
    f"backends/xferlib_jax/{name}.py"
    for name in (
        *("_cpu", "_engine", "_promise", "_reading", "_memory", "_arrays", "_sharded", "_spread", "_stagers", "_prefetch"),
        *("_gather", "_imports", "_unpack", "_capsule", "_copies", "_save"),
    )
)

PUTS = "xferlib/h2d.py"

MUTANTS = [
    (SAVE, "device = min(devices, key=self._nbytes.__getitem__)", "device = devices[0]"),
    (SAVE, "            self._nbytes[device] += _arrays.nbytes_of(shard)\n", ""),
    (SAVE, "hold(devices, keep=True)", "hold(devices, keep=False)"),
    (SAVE, "        self._held.release()\n", "        pass\n"),
    (SAVE, "    refuse_finalizers()\n", ""),
    (SAVE, "        _arrays.check_dtype(array.dtype)\n", ""),
    (SAVE, "        _arrays.check_class(array)\n", ""),
    (SAVE, "not places or len(places) *", "not places or 1 *"),
    (SAVE, "not places or len(places)", "len(places)"),
    (SAVE, "            found |= dict.fromkeys(leaf.sharding.addressable_devices)\n", "            pass\n"),
    (
        CPU,
        "block.address + offset, shape, dtype, order=None, lease=lease)",
        "block.address + offset, shape, dtype, order=None, lease=block)",
    ),
    (CPU, "self._readings.make(array, capsule))", "array)"),
    (CPU, "        if _is_ready(array):\n", "        if True:\n"),
    (CPU, "        self._readings.let_go()\n", ""),
    (
        CPU,
        "        # As it closes, the core gives back pinned memory and then device memory; nobody has asked JAX about the latter since.\n        self.sweep()\n",
        "",
    ),
    (ENGINE, "move(dst, promise.wait() + offset, nbytes)", "move(dst, promise.wait(), nbytes)"),
    (
        ENGINE,
        "                self._unmade.setdefault(caller, _Failure(error.cause, lasting=False))",
        "                self._broken = _Failure(error.cause, lasting=True)",
    ),
    (ENGINE, "self._unmade.pop(event.caller, None)", "self._unmade.get(event.caller)"),
    (ENGINE, "self._unmade.pop(event.caller, None)", "next(iter(self._unmade.values()), None)"),
    (ENGINE, "    return threading.get_ident(), collects()\n", "    return threading.get_ident(), False\n"),
    (ENGINE, "    note_copy_thread()\n", ""),
    (PROMISE, "        number = next(self._numbers) % MOST\n        while", "        number = next(self._numbers)\n        while"),
    (PROMISE, "        while number in self._live:\n", "        while False:\n"),
    (ENGINE, "        if self._broken is not None:\n            return\n        try:", "        try:"),
    (
        PROMISE,
        "        if tensor.strides is None:\n            return tensor.address\n",
        "        if tensor.strides is not None:\n            return tensor.address\n",
    ),
    (PROMISE, "            if reading.capsule is None:\n", "            if True:\n"),
    (READING, "            for number in numbers:\n", "            for number in numbers[:1]:\n"),
    (MEMORY, "if address in self._pages or self._ends.pop(address, None) is None:", "if self._ends.pop(address, None) is None:"),
    (MEMORY, "if any(start < end and address < stop for", "if any(start <= end and address < stop for"),
    (
        CPU,
        "if address is None and exported(capsule).strides is None:",
        "if address is None and (array.ndim > 2 or exported(capsule).strides is None):",
    ),
    (ARRAYS, "    if found != device:", "    if found.platform != device.platform:"),
    (ARRAYS, "            if len(self._shardings) >= MOST_SHARDINGS:\n", "            if False:\n"),
    (
        SHARDED,
        "            arrays = [array[: slot.rows] for array in arrays]",
        "            arrays = [array[: slot.rows] for array in arrays[:1]] + arrays[1:]",
    ),
    (
        SHARDED,
        "        if not all(completion.done() for completion in self._completions):",
        "        if not self._completions[0].done():",
    ),
    (
        SHARDED,
        "    except BaseException:\n        wait_for_all(transfers.values())\n        raise",
        "    except BaseException:\n        raise",
    ),
    (SHARDED, "            ended.wait()\n        wait_for_all(transfers.values())\n", "            ended.wait()\n"),
    (SHARDED, "            ended.wait()\n", "            pass\n"),
    (
        SHARDED,
        "        with jax.enable_x64(wide):\n            transfers",
        "        with jax.enable_x64(False):\n            transfers",
    ),
    (SHARDED, "            return batch.ring.slots <= self._depth", "            return batch.ring.slots < self._depth"),
    (
        SHARDED,
        "        key = (tree, riders, *((array.shape, array.dtype) for array in arrays))",
        "        key = (tree, riders, *(array.shape for array in arrays))",
    ),
    (SPREAD, "        if start + self.step > len(shard):", "        if start + self.step >= len(shard):"),
    (STAGERS, "if id(stager) not in used]", "if id(stager) not in used or self._rows]"),
    (STAGERS, "_settle(shared.let_go(watch.number))", "shared.let_go(watch.number)"),
    (STAGERS, "lambda device: device not in local", "lambda device: False"),
    (STAGERS, "uninterrupted(self._fill, number, row, devices)", "self._fill(number, row, devices)"),
    (
        STAGERS,
        "        except BaseException:\n            self.let_go(number)\n            raise",
        "        except BaseException:\n            raise",
    ),
    (PREFETCH, 'if charge.memory == "device" else charge', "if True else charge"),
    (GATHER, "last[parts.overlap :]", "last"),
    (CAPSULE, "        if capsule is None or _is_valid(capsule, NAME):\n", "        if capsule is None:\n"),
    (UNPACK, "    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT", "    return nbytes"),
    (
        CAPSULE,
        "        words[numbers] = BIAS\n        self._free.extend(freed)\n",
        "        words[numbers] = BIAS\n        list(freed)\n",
    ),
    (
        CAPSULE,
        "                words[start].value = BIAS\n                self._free.extend(freed)\n",
        "                words[start].value = BIAS\n                list(freed)\n",
    ),
    (
        CAPSULE,
        "                words[start].value = BIAS\n                self._free.extend(freed)\n",
        "                self._free.extend(freed)\n",
    ),
    (
        "backends/xferlib_jax/_reading.py",
        '    return _OF_PROCESS.setdefault("", Readings(_jax.collect_garbage))\n',
        "    return Readings(_jax.collect_garbage)\n",
    ),
    (COPIES, ".address + offset, nbytes", ".address, nbytes"),
    (COPIES, "places[index] = number, end, nbytes", "places[index] = number, 0, nbytes"),
    (COPIES, "jax.lax.reshape(_bits(arrays[number]), ", "jax.lax.reshape(arrays[number], "),
    (COPIES, "alone or last is None or dtype != last or", "alone or last is None or"),
    (COPIES, "last is None or ", ""),
    (COPIES, "with suppress(Exception), jax.enable_x64(wide):", "with suppress(Exception):"),
    (CPU, "stream is None and (type(arrays[0]) is Part or self._check_array.accepts(arrays))", "True"),
    (ARRAYS, " or any(array.is_deleted() for array in arrays)", ""),
    (PUTS, "if self._makes_meanwhile or dtype not in self._dtypes:", "if True:"),
    (PUTS, "if self._makes_meanwhile or dtype not in self._dtypes:", "if self._makes_meanwhile:"),
    (PUTS, "value = make() if self._makes_meanwhile or not packing.dtypes <= self._dtypes else", "value = make() if True else"),
    (
        PUTS,
        "value = make() if self._makes_meanwhile or not packing.dtypes <= self._dtypes else",
        "value = make() if self._makes_meanwhile else",
    ),
    ("xferlib/pipeline/prefetch.py", "        transfer._make_ahead()\n", ""),
]
