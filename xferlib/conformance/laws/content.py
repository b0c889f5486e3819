"""Law 1. Once done, the destination holds the source's values, shape and dtype; what would be narrowed is refused.

Sources and destinations lie in memory of every kind. Nothing is held here: other laws test that the data is there when it should
be.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from xferlib.conformance.base import Laws
from xferlib.conformance.moves import WAYS, prepare
from xferlib.conformance.values import DTYPES, LARGE, SHAPES, Array, assert_same, dtype_named, pattern, words
from xferlib.errors import CapabilityError
from xferlib.stager import Stager

__all__ = ["ContentLaws"]

THREADS = 4
ROUNDS = 10
MEMORY = ("pinned", "pageable", "registered", "file")
"""Where sources lie: `registered` is memory of the caller's that was pinned in place."""
SIDE_BY_SIDE = ((2, 128 << 10), (12, 128 << 10), (3, 72 << 10), (4, 256 << 10), (9, (128 << 10) - 8))
"""Numbers of leaves, and bytes of each: too large to share a block, and so small that their blocks may lie side by side."""


class Pair(NamedTuple):
    left: Any
    right: Any


class ContentLaws(Laws):
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_law01_put_keeps_values_shape_and_dtype(self, stager: Stager, dtype: str) -> None:
        if not self.accepts(stager, dtype):
            self.assert_put_refuses(stager, dtype)
            return
        for seed, shape in enumerate(SHAPES):
            values = pattern(shape, dtype_named(dtype), seed)
            assert_same(self.to_numpy(stager.put(self.pinned(stager, values)).result()), values)
            assert_same(self.to_numpy(stager.put(values).result()), values)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_law01_get_keeps_values_shape_and_dtype(self, stager: Stager, dtype: str) -> None:
        if not self.accepts(stager, dtype):
            self.assert_put_refuses(stager, dtype)
            return
        for seed, shape in enumerate(SHAPES):
            values = pattern(shape, dtype_named(dtype), seed)
            array = self.from_numpy(values)
            assert_same(stager.get(array).result(), values)
            for out in (stager.empty_pinned(shape, values.dtype), np.empty_like(values)):
                stager.get(array, out=out).synchronize()
                assert_same(out, values)

    def test_law01_put_into_overwrites_the_array_of_the_caller(self, stager: Stager) -> None:
        if self.put_into_is_refused(stager):
            return
        values = words(1)
        array = self.from_numpy(words(2))
        for source in (self.pinned(stager, values), values):
            stager.put(source, into=array).synchronize()
            assert_same(self.to_numpy(array), values)
            stager.put(self.pinned(stager, words(2)), into=array).synchronize()

    @pytest.mark.parametrize("way", WAYS)
    def test_law01_large_arrays_arrive_whole(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, pattern((LARGE - 3,), np.dtype(np.uint8), 1))
        transfer = move.start()
        transfer.synchronize()
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("memory", MEMORY)
    def test_law01_put_takes_any_layout(self, stager: Stager, memory: str, tmp_path: Path) -> None:
        values = pattern((12, 10), np.dtype(np.int32), 3)
        with ExitStack() as stack:
            raw = self.memory(stager, memory, 2 * values.nbytes + 1, tmp_path, stack)
            if raw is None:
                return
            base = raw[: values.nbytes].view(np.int32).reshape(values.shape)
            base[...] = values
            unaligned = raw[values.nbytes + 1 :].view(np.int32)
            unaligned[...] = values.reshape(-1)
            frozen = base[2:]
            frozen.flags.writeable = False
            layouts = {
                "part": base[3:7],
                "columns": base[:, 2:5],
                "every third row": base[::3],
                "backwards": base[::-1, ::-1],
                "transposed": base.T,
                "unaligned": unaligned,
                "unaligned and strided": unaligned[::2],
                "repeated": np.broadcast_to(base[0], (4, 10)),
                "read-only": frozen,
            }
            for layout, source in layouts.items():
                assert np.array_equal(self.to_numpy(stager.put(source).result()), source), layout
            arrays = stager.put(layouts).result()
            assert list(arrays) == list(layouts)
            for layout, source in layouts.items():
                assert np.array_equal(self.to_numpy(arrays[layout]), source), f"{layout}, as a leaf"

    def test_law01_get_takes_any_layout(self, stager: Stager) -> None:
        values = pattern((12, 10), np.dtype(np.int32), 3)
        arrays = dict(self.layouts(values))
        for layout, array in arrays.items():
            out = stager.empty_pinned(values.shape, values.dtype), np.empty_like(values)
            assert np.array_equal(stager.get(array).result(), values), layout
            for place in out:
                assert np.array_equal(stager.get(array, out=place).result(), values), layout
        if arrays:
            for layout, got in stager.get(arrays).result().items():
                assert_same(np.ascontiguousarray(got), values)
                assert got.shape == values.shape, layout

    @pytest.mark.parametrize("memory", ["pinned", "pageable"])
    def test_law01_leaves_that_lie_side_by_side_arrive_whole(self, stager: Stager, memory: str) -> None:
        for leaves, nbytes in SIDE_BY_SIDE:
            values = [words(seed, nbytes) for seed in range(leaves)]
            sources = [self.pinned(stager, value) if memory == "pinned" else value.copy() for value in values]
            for _ in range(2):
                arrays = self.assert_arrives(lambda: stager.put(sources))  # noqa: B023  # Called at once.
                for array, value in zip(arrays, values, strict=True):
                    assert_same(self.to_numpy(array), value)
            for got, value in zip(self.assert_arrives(lambda: stager.get(arrays)), values, strict=True):  # noqa: B023
                assert_same(got, value)

    @pytest.mark.parametrize("way", ["put", "get", "put_into"])
    def test_law01_a_tree_with_a_leaf_that_is_refused_starts_nothing(self, stager: Stager, way: str) -> None:
        good, old = self.pinned(stager, words(1)), words(2)
        wrong: list[Any] = [np.array([None, "no number"]), np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros(3, ">i4")]
        wrong += [pattern((8,), dtype_named(name), 1) for name in DTYPES if not self.accepts(stager, name)]
        device, out = self.from_numpy(words(1)), self.pinned(stager, old)
        for leaf in wrong:
            for order in (1, -1):
                with pytest.raises((TypeError, ValueError, CapabilityError)):
                    if way == "get":
                        stager.get([device, device][::order], out=[out, leaf][::order])
                    elif way == "put_into":
                        stager.put([good, leaf][::order], into=[device, device][::order])
                    else:
                        stager.put([good, leaf][::order])
        stats = stager.stats()
        assert (stats.h2d_nbytes, stats.d2h_nbytes, stats.device_nbytes) == (0, 0, 0)
        # Anything that was queued would have to run before these are done.
        stager.get(stager.put(good).result()).synchronize()
        assert_same(out, old)
        assert_same(self.to_numpy(device), words(1))

    @pytest.mark.parametrize("memory", ["pinned", "pageable"])
    def test_law01_get_fills_what_it_is_given_and_nothing_else(self, stager: Stager, memory: str) -> None:
        values = words(5)
        array = self.from_numpy(values)
        for first in (0, 1, 256):
            room = pattern((first + values.nbytes + 300,), np.dtype(np.uint8), 6)
            if memory == "pinned":
                room = self.pinned(stager, room)
            want = room.copy()
            want[first : first + values.nbytes] = values.view(np.uint8)
            stager.get(array, out=room[first : first + values.nbytes].view(np.int32)).synchronize()
            assert_same(room, want)

    def test_law01_get_takes_views_and_aliases(self, stager: Stager) -> None:
        array = self.put_values(stager, words(4))
        for name, alias in self.aliases(array):
            want = self.to_numpy(alias)
            got = stager.get(alias).result()
            assert np.array_equal(got, want), name
            assert got.dtype == want.dtype, name

    def test_law01_trees_keep_their_structure(self, stager: Stager) -> None:
        def tree(leaves: list[Any]) -> Any:
            a, b, c, d, e = leaves
            return {"pair": Pair(a, [b, None]), "rest": ((c,), {"x": d, "empty": e})}

        def leaves_of(tree: Any) -> list[Any]:
            (c,), rest = tree["rest"]
            assert tree["pair"].right[1] is None
            return [tree["pair"].left, tree["pair"].right[0], c, rest["x"], rest["empty"]]

        shapes = [(300,), (), (5, 3), (40_000,), (0, 2)]
        values = [pattern(shape, np.dtype(np.int32), seed) for seed, shape in enumerate(shapes)]
        sources = [self.pinned(stager, value) if index % 2 else value for index, value in enumerate(values)]
        for got, want in zip(leaves_of(stager.put(tree(sources)).result()), values, strict=True):
            assert_same(self.to_numpy(got), want)
        arrays = tree([self.from_numpy(value) for value in values])
        for got, want in zip(leaves_of(stager.get(arrays).result()), values, strict=True):
            assert_same(got, want)

    def test_law01_threads_do_not_mix_their_data(self, stager: Stager) -> None:
        def work(thread: int) -> None:
            for turn in range(ROUNDS):
                values = words(thread * ROUNDS + turn, 40_000)
                source = self.pinned(stager, values) if turn % 2 else values
                array = stager.put(source).result()
                assert_same(self.to_numpy(array), values)
                assert_same(stager.get(array).result(), values)
                out: Array = np.empty_like(values)
                stager.get(array, out=out).synchronize()
                assert_same(out, values)

        calls = [self.calls.start(lambda thread=thread: work(thread)) for thread in range(THREADS)]  # type: ignore[misc]  # default
        for call in calls:
            call.result(6 * self.deadline_seconds)

    def memory(self, stager: Stager, kind: str, nbytes: int, folder: Path, stack: ExitStack) -> Array | None:
        """Return bytes of this kind of memory; None, after asserting the refusal, where the backend has none."""
        if kind == "pinned":
            return stager.empty_pinned(nbytes, np.uint8)
        if kind == "file":
            return np.memmap(folder / "values", np.uint8, "w+", shape=(nbytes,))
        array: Array = np.empty(nbytes, np.uint8)
        if kind == "registered":
            if not stager.capabilities.register:
                with pytest.raises(CapabilityError):
                    stager.pin(array)
                return None
            stack.enter_context(stager.pin(array))
        return array

    def accepts(self, stager: Stager, dtype: str) -> bool:
        """Tell whether the backend promises this dtype."""
        try:
            stager.backend.check_dtype(dtype_named(dtype))
        except TypeError:
            return False
        return True

    def assert_put_refuses(self, stager: Stager, dtype: str) -> None:
        """Assert that a dtype which the framework would narrow is refused, and that nothing was started."""
        source = self.pinned(stager, pattern((8,), dtype_named(dtype), 1))
        with pytest.raises(TypeError):
            stager.put(source)
        assert stager.stats().h2d_nbytes == 0
