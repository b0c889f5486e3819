"""Files, trees, and where leaves lie."""

from __future__ import annotations

LOAD, TREE, LAYOUT, FORMATS = "xferlib/files/load.py", "xferlib/tree.py", "xferlib/packing.py", "xferlib/files/formats.py"
AHEAD, DTYPES = "xferlib/files/ahead.py", "xferlib/files/dtypes.py"
READERS, SHARDS = "xferlib/files/readers.py", "xferlib/files/shards.py"

MUTANTS = [
    (READERS, "suffix = file.suffix.lower()", "suffix = file.suffix"),
    (READERS, "    _check_kind(file, file.stat().st_mode)\n", ""),
    (READERS, "_header(stream, nbytes).nbytes)\n            stream.seek(0)", "_header(stream, nbytes).nbytes)"),
    (READERS, "return read(stream, member.file_size)", "return read(stream, member.compress_size)"),
    (READERS, "if version == (1, 0) else", "if version >= (1, 0) else"),
    (READERS, "    if length > LARGEST_HEADER:", "    if False:"),
    (READERS, "if promised > there:", "if promised > total:"),
    (READERS, "if promised > there:", "if promised >= there:"),
    (READERS, "start = total - sum(sizes)", "start = total - sum(sizes[1:]) - (sizes[0] if sizes else 0) // 8 * 8"),
    (READERS, "        start += nbytes\n", "        start += -(-nbytes // 8) * 8\n"),
    (READERS, "return count * int(bits[1]) // 8", "return count * (int(bits[1]) // 8)"),
    (READERS, "        if name in self._members:\n", "        if False:\n"),
    (READERS, "OF_DAMAGE = (None, errno.EINVAL)", "OF_DAMAGE = (None,)"),
    (READERS, "    except MemoryError:\n        raise\n", ""),
    (SHARDS, "difflib.get_close_matches(str(name), likely", "difflib.get_close_matches(name, likely"),
    (SHARDS, '".." in parts', "False"),
    (SHARDS, "promised[said] if names is None else reader.names", "promised[said]"),
    (SHARDS, "promised[said] if names is None else reader.names", "reader.names"),
    (SHARDS, "PATTERN & set(str(file)) and not file.exists()", "PATTERN & set(str(file))"),
    (LOAD, "        started.synchronize()\n        arrays = started.value", "        arrays = started.value"),
    (LOAD, "(1 if piece.reader.in_memory else AHEAD)", "AHEAD"),
    (LOAD, "return {name: self._found[name] for name in self._held.arrays}", "return self._found"),
    (LOAD, "        for _, started in self._under_way:\n", "        for _, started in ():\n"),
    (AHEAD, "        self._ticket = ticket(self._asked.put, None)\n", ""),
    (LOAD, "self._sizes[name] > SMALL, self._changes(reader, name)", "self._sizes[name] > SMALL, False"),
    (LOAD, "        if self._gone >= GIVEN_BACK:", "        if False:"),
    (LOAD, "        if self._gone:\n", "        if False:\n"),
    (AHEAD, "if not _is_cached(descriptor, block):", "if True:"),
    (AHEAD, "        if self._thread is not None:\n            self._thread.join()", "        pass"),
    (AHEAD, "<= last.nbytes + ADVISED", "<= -1"),
    (DTYPES, 'dtype.kind == "f" or dtype.name in FLOATS', 'dtype.kind == "f"'),
    (FORMATS, '"C64": "complex64"', '"C64": "complex128"'),
    (FORMATS, '"F8_E4M3FNUZ": "float8_e4m3fnuz"', '"F8_E4M3FNUZ": "float8_e4m3fn"'),
    (
        TREE,
        "                self._register(kind, _fields, _rebuild)\n                found = True\n",
        "                self._register(kind, _fields, _rebuild)\n",
    ),
    (TREE, "for field in dataclasses.fields(instance))", "for field in dataclasses.fields(instance) if field.init)"),
    (
        TREE,
        "    if _shape_of(other) != _shape_of(spec):",
        "    if (other is None) != (spec is None):",
    ),
    (TREE, 'return not hasattr(leaf, "dtype") and not rides_along(type(leaf))', "return not rides_along(type(leaf))"),
    (TREE, 'return not hasattr(leaf, "dtype") and not rides_along(type(leaf))', 'return not hasattr(leaf, "dtype")'),
    (TREE, "issubclass(kind, RIDERS) and not issubclass(kind, np.generic)", "issubclass(kind, RIDERS)"),
    (
        TREE,
        "return (spec.spec, spec.riders.keys()) if isinstance(spec, Mixed) else spec",
        "return spec.spec if isinstance(spec, Mixed) else spec",
    ),
    (TREE, "for number in range(spec.num_leaves) if number not in riders][index]", "for number in range(spec.num_leaves)][index]"),
    (TREE, "object.__setattr__(instance, field.name, value)", "setattr(instance, field.name, value)"),
    (LAYOUT, "if nbytes > PACK_UP_TO:", "if nbytes >= PACK_UP_TO:"),
    (LAYOUT, "max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT", "-(-nbytes // ALIGNMENT) * ALIGNMENT"),
    (LAYOUT, "runs.append((index, last))", "runs.append((0, last))"),
    (LAYOUT, "                self.numbers.append(len(self.sizes) - 1)", "                self.numbers.append(index)"),
    (
        LAYOUT,
        "tuple([array.shape for array, _ in sources]), tuple(runs)",
        "tuple([array.size for array, _ in sources]), tuple(runs)",
    ),
    (LAYOUT, "while len(self._kept) > KEPT:", "while len(self._kept) > KEPT * KEPT:"),
]
