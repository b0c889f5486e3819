"""Law 1. Once done, the destination holds the source's values, shape and dtype; what would be narrowed is refused.

Sources lie in memory of every kind, destinations too. Nothing is held here: that the data is there when it should be is the matter
of other laws.
"""

from __future__ import annotations

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
        values = words(1)
        array = self.from_numpy(words(2))
        if not stager.capabilities.put_into:
            with pytest.raises(CapabilityError):
                stager.put(values, into=array)
            return
        for source in (self.pinned(stager, values), values):
            stager.put(source, into=array).synchronize()
            assert_same(self.to_numpy(array), values)
            stager.put(words(2), into=array).synchronize()

    @pytest.mark.parametrize("way", WAYS)
    def test_law01_large_arrays_arrive_whole(self, stager: Stager, way: str) -> None:
        move = prepare(self, stager, way, pattern((LARGE - 3,), np.dtype(np.uint8), 1))
        transfer = move.start()
        transfer.synchronize()
        assert_same(move.read(transfer), move.values)

    @pytest.mark.parametrize("memory", ["pinned", "pageable"])
    def test_law01_put_takes_any_layout(self, stager: Stager, memory: str) -> None:
        base = pattern((12, 10), np.dtype(np.int32), 3)
        if memory == "pinned":
            base = self.pinned(stager, base)
        room = np.zeros(base.nbytes + 1, np.uint8)
        unaligned = (self.pinned(stager, room) if memory == "pinned" else room)[1:].view(np.int32)
        unaligned[...] = base.reshape(-1)
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
            array = stager.put(source).result()
            assert np.array_equal(self.to_numpy(array), source), layout
            assert tuple(array.shape) == source.shape, layout

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

    def accepts(self, stager: Stager, dtype: str) -> bool:
        """Tell whether the backend promises this dtype."""
        try:
            stager.backend.check_dtype(dtype_named(dtype))
        except TypeError:
            return False
        return True

    def assert_put_refuses(self, stager: Stager, dtype: str) -> None:
        """Assert that a dtype which the framework would narrow is refused, and nothing was started."""
        source = self.pinned(stager, pattern((8,), dtype_named(dtype), 1))
        with pytest.raises(TypeError):
            stager.put(source)
        assert stager.stats().h2d_nbytes == 0
