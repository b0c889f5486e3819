"""Files, trees, and where leaves lie."""

from __future__ import annotations

LOAD, TREE, LAYOUT, FORMATS = "xferlib/files/load.py", "xferlib/tree.py", "xferlib/packing.py", "xferlib/files/formats.py"

MUTANTS = [
    (LOAD, "match file.suffix.lower():", "match file.suffix:"),
    (LOAD, 'npy.open_memmap(opened, mode="r")', 'npy.open_memmap(opened, mode="r+")'),
    (LOAD, "return _put(file, stager, _mapped(file, opened)).result()", "return _put(file, stager, _mapped(file, opened)).value"),
    (LOAD, "                last.synchronize()\n", "                last.done()\n"),
    (LOAD, "transfer.result() for name, transfer in", "transfer.value for name, transfer in"),
    (LOAD, "_check_header(stream, member.file_size)", "_check_header(stream, member.compress_size)"),
    (LOAD, "npy.read_magic(stream) == (1, 0)", "npy.read_magic(stream) >= (1, 0)"),
    (LOAD, "if promised > there:", "if promised > total:"),
    (LOAD, "if promised > there:", "if promised >= there:"),
    (LOAD, "return {name: found[name] for name in names}", "return dict(found)"),
    (LOAD, "start = total - sum(sizes)", "start = total - sum(sizes[1:]) - (sizes[0] if sizes else 0) // 8 * 8"),
    (LOAD, "        start += nbytes\n", "        start += -(-nbytes // 8) * 8\n"),
    (LOAD, "return count * int(bits[1]) // 8", "return count * (int(bits[1]) // 8)"),
    (FORMATS, '"C64": "complex64"', '"C64": "complex128"'),
    (FORMATS, '"F8_E4M3FNUZ": "float8_e4m3fnuz"', '"F8_E4M3FNUZ": "float8_e4m3fn"'),
    (LOAD, "OF_DAMAGE = (None, errno.EINVAL)", "OF_DAMAGE = (None,)"),
    (LOAD, "    except MemoryError:\n        raise\n", ""),
    (LOAD, "difflib.get_close_matches(str(name), found, n=1)", "difflib.get_close_matches(name, found, n=1)"),
    (LOAD, "    if not names:\n        return {}\n", ""),
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
