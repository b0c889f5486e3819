"""Taking a block of many arrays apart: the same values, whatever lies in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xferlib.conformance.values import assert_same, pattern
from xferlib.protocol import Place

MIXED = [
    *[((33,), "float32"), ((4, 8, 2), "float32"), ((64,), "float32"), ((0,), "float32"), ((), "float32")],
    *[((5,), "bool"), ((2, 3), "complex64"), ((7,), "int8"), ((1, 1), "uint16"), ((9,), "bfloat16"), ((3,), "float8_e4m3fn")],
]
ALIGNMENT = 256


class Packed:
    """Arrays side by side, as a put lays them; `adopt` stands for the import of device memory."""

    def __init__(self, jax: Any, count: int, *, last: tuple[tuple[int, ...], str] | None = None) -> None:
        self.jax = jax
        self.adopted = 0
        self.values = []
        places = []
        offset = 0
        for seed in range(count):
            shape, name = last if last is not None and seed == count - 1 else MIXED[seed % len(MIXED)]
            values = pattern(shape, np.dtype(getattr(ml_dtypes, name, name)), seed)
            places.append(Place(offset, shape, values.dtype))
            self.values.append(values)
            offset += max(1, -(-values.nbytes // ALIGNMENT)) * ALIGNMENT
        self.places = tuple(places)
        self.bytes = np.zeros(offset, np.uint8)
        for place, values in zip(places, self.values, strict=True):
            self.bytes[place.offset : place.offset + values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)

    def adopt(self, wanted: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]]) -> list[Any]:
        self.adopted += len(wanted)
        return [self._adopted(*place) for place in wanted]

    def _adopted(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self.jax.ensure_compile_time_eval():
            return self.jax.device_put(self.bytes[offset : offset + nbytes].view(dtype).reshape(shape))

    def assert_taken_apart(self, arrays: list[Any]) -> None:
        for array, values in zip(arrays, self.values, strict=True):
            assert_same(np.asarray(array), values)


@pytest.fixture
def jax(stager: object) -> Any:
    """The framework; the stager has imported it, or the test is skipped."""
    from xferlib_jax import conformance

    return conformance.bench().jax


@pytest.fixture
def unpack(jax: Any) -> Callable[[Packed], list[Any]]:
    from xferlib_jax import _unpack

    origin = _unpack.zero(jax.devices()[0])
    return lambda packed: _unpack.unpack(packed.places, packed.adopt, origin)


def test_many_arrays_are_taken_apart_by_one_import_a_dtype(jax: Any, unpack: Callable[[Packed], list[Any]]) -> None:
    packed = Packed(jax, 60)
    dtypes = {values.dtype for values in packed.values}
    for turn in (1, 2):
        packed.assert_taken_apart(unpack(packed))
        assert packed.adopted == turn * len(dtypes)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_last_array_is_whole_however_long_it_is(jax: Any, unpack: Callable[[Packed], list[Any]], dtype: str) -> None:
    packed = Packed(jax, 16, last=((3 * ALIGNMENT + 1,), dtype))
    packed.assert_taken_apart(unpack(packed))


def test_a_few_arrays_are_imported_each(jax: Any, unpack: Callable[[Packed], list[Any]]) -> None:
    packed = Packed(jax, 11)
    packed.assert_taken_apart(unpack(packed))
    assert packed.adopted == 11


def test_places_that_32_bits_cannot_count_are_right(
    jax: Any, unpack: Callable[[Packed], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xferlib_jax import _unpack

    packed = Packed(jax, 60)
    monkeypatch.setattr(_unpack, "MOST", packed.bytes.size // 4)
    packed.assert_taken_apart(unpack(packed))


def test_what_is_put_inside_a_trace_is_no_traced_value(jax: Any, unpack: Callable[[Packed], list[Any]]) -> None:
    packed = Packed(jax, 60)
    taken: list[Any] = []

    def traced(number: Any) -> Any:
        taken.extend(unpack(packed))
        return number + 1

    jax.jit(traced)(np.float32(1))
    assert not any(isinstance(array, jax.core.Tracer) for array in taken)
    packed.assert_taken_apart(taken)


def test_programs_are_kept_and_trees_of_ever_other_kinds_are_imported_one_by_one(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that JAX unloads makes every thread wait for the device."""
    from xferlib_jax import _unpack

    origin, most = _unpack.zero(jax.devices()[0]), 3
    monkeypatch.setattr(_unpack, "_recipes", {})
    monkeypatch.setattr(_unpack, "_found", OrderedDict())
    monkeypatch.setattr(_unpack, "MOST_RECIPES", most)
    monkeypatch.setattr(_unpack, "MOST_FOUND", 2)
    for turn in range(2):
        for number in range(most + 2):
            # Others at each turn, of equal places: what is compiled is found by what the places are.
            packed = Packed(jax, 20 + number)
            packed.assert_taken_apart(_unpack.unpack(packed.places, packed.adopt, origin))
            imported_each = packed.adopted == len(packed.places)
            assert imported_each == (number >= most)
            assert len(_unpack._recipes) == (min(number + 1, most) if turn == 0 else most)
            assert len(_unpack._found) <= 2
