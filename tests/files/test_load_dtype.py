"""Conversion on the device: what comes out is what the framework's `astype` makes, and no more memory is needed than is said."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from xferlib_host import open_stager

import xferlib
from xferlib.conformance.values import assert_same
from xferlib.stager import Stager

RANDOM = np.random.default_rng(3)
ARRAYS: dict[str, Any] = {
    "a.weight": RANDOM.random((300, 70)).astype(np.float32),
    "a.bias": RANDOM.random(70).astype(np.float32),
    "b.weight": RANDOM.random((40, 30)).astype(np.float16),
    "ids": np.arange(7, dtype=np.int32),
    "mask": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True) as stager:
        yield stager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", ml_dtypes.bfloat16, np.float16, np.dtype(np.float64), "float8_e4m3fn"], ids=str)
def test_one_dtype_is_that_of_all_arrays_of_floating_point(stager: Stager, path: Path, dtype: Any) -> None:
    target = np.dtype(getattr(ml_dtypes, dtype) if isinstance(dtype, str) else dtype)
    got = xferlib.load(path, stager, dtype=dtype)
    assert set(got) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert_same(got[name], array.astype(target) if array.dtype.kind == "f" else array)


def test_what_ml_dtypes_adds_is_of_floating_point(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    half = RANDOM.random(50).astype(ml_dtypes.bfloat16)
    xferlib.save(path, {"half": stager.put(half, borrow=True).value}, stager).result(60)
    assert_same(xferlib.load(path, stager, dtype=np.float32)["half"], half.astype(np.float32))


def test_patterns_say_which_arrays_and_the_first_that_fits_counts(stager: Stager, path: Path) -> None:
    got = xferlib.load(path, stager, dtype={"a.bias": "float64", "a.*": "float16", "ids": np.int8})
    changed = {"a.bias": np.float64, "a.weight": np.float16, "ids": np.int8}
    for name, array in ARRAYS.items():
        assert_same(got[name], array.astype(changed.get(name, array.dtype)))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_other_formats_are_converted_too(stager: Stager, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    array = ARRAYS["a.weight"]
    np.save(path, array) if suffix == ".npy" else np.savez(path, array=array)
    got = xferlib.load(path, stager, dtype="float16")
    assert_same(got if suffix == ".npy" else got["array"], array.astype(np.float16))


def test_a_name_of_like_stands_for_itself_though_it_ends_as_that_of_a_subtree(stager: Stager, path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no array named 'a\.'"):
        xferlib.load(path, stager, like={"a": {"": np.zeros(70, np.float32)}})


def test_a_tree_is_compared_with_what_comes_out(stager: Stager, path: Path) -> None:
    like = {"a": {"bias": np.zeros(70, np.float16), "weight": np.zeros((300, 70), np.float16)}}
    got: Any = xferlib.load(path, stager, like=like, dtype="float16")
    assert_same(got["a"]["weight"], ARRAYS["a.weight"].astype(np.float16))
    with pytest.raises(
        ValueError, match=r"'a\.bias' is of shape \(70,\) and dtype float32, and like has \(70,\) and float16\. To"
    ) as told:
        xferlib.load(path, stager, like=like)
    _, _, advice = str(told.value).partition("pass dtype=")
    rule = ast.literal_eval(advice[: advice.index("}") + 1])
    assert_same(
        xferlib.load(path, stager, like={"a": {"bias": like["a"]["bias"]}}, dtype=rule)["a"]["bias"],
        ARRAYS["a.bias"].astype(np.float16),
    )


def test_a_pattern_that_no_name_has_is_refused_before_anything_is_put(stager: Stager, path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype: none of the arrays has a name like 'a\.wieght'"):
        xferlib.load(path, stager, dtype={"a.wieght": "float16"})
    with pytest.raises(ValueError, match=r"dtype: 'a\.\*' comes behind '\*', which fits all of its names"):
        xferlib.load(path, stager, dtype={"*": "float32", "a.*": "float16"})
    # The arrays of this file do not tell them apart, and those of another may.
    with pytest.raises(ValueError, match=r"dtype: 'a\.bias' comes behind 'a\.b\*', which fits all of its names"):
        xferlib.load(path, stager, dtype={"a.b*": "float16", "a.bias": "float32"})
    with pytest.raises(ValueError, match=r"dtype: none of the arrays has a name like ''"):
        xferlib.load(path, stager, dtype={"": "float16"})
    with pytest.raises(TypeError, match=r"dtype='flaot16': expected a dtype, or dtypes by patterns"):
        xferlib.load(path, stager, dtype="flaot16")
    number: Any = {1: "float16"}
    with pytest.raises(TypeError, match="dtype: 1 is no pattern of names: expected text"):
        xferlib.load(path, stager, dtype=number)
    unsaid: Any = {"a.bias": None, "*": "float16"}
    with pytest.raises(TypeError, match="dtype: None for a pattern"):
        xferlib.load(path, stager, dtype=unsaid)
    with pytest.raises(TypeError, match="not dtype"):
        xferlib.load(path, stager, dtype=object)
    assert stager.stats().h2d_nbytes == 0
    assert_same(xferlib.load(path, stager, dtype={"a.bias": "float32", "a.b*": "float16"})["a.bias"], ARRAYS["a.bias"])


def test_a_package_that_is_missing_is_named_with_what_to_type(stager: Stager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ModuleNotFoundError, match=r"dtype='bfloat16' is of ml_dtypes\. Install it with: pip install") as caught:
        xferlib.load(path, stager, dtype="bfloat16")
    assert caught.value.name == "ml_dtypes"


def test_beside_the_result_the_device_has_no_more_than_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two arrays are of one size, so no memory can be used twice."""
    arrays = {str(number): RANDOM.integers(0, 99, (1 << 18) + 50_000 * number).astype(np.float32) for number in range(12)}
    arrays |= {f"half {number}": np.zeros((1 << 19) + number, np.float16) for number in range(2)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    largest = max(array.nbytes for array in arrays.values())
    monkeypatch.setattr("xferlib.files.load.PIECE_NBYTES", 1 << 20)
    monkeypatch.setattr("xferlib.files.load.TRIM_AFTER_NBYTES", 2 << 20)
    with xferlib.stager("host", strict=True) as stager:
        got = xferlib.load(tmp_path / "a.safetensors", stager, dtype="float16")
        kept = sum(array.nbytes for array in arrays.values() if array.dtype == np.float16)
        # What was converted is the framework's own.
        assert stager.stats().device_peak_nbytes <= kept + (2 << 20) + 3 * largest
        assert stager.stats().device_nbytes <= kept + (256 << 10)
        for name, array in arrays.items():
            assert_same(got[name], array.astype(np.float16))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_files_are_converted_within_a_limit_that_fewer_fit_in_than_may_be_on_their_way(tmp_path: Path, limit: int) -> None:
    """Each leaves room when it is converted."""
    nbytes = 1 << 20
    arrays: dict[str, Any] = {str(number): np.full(nbytes // 4, number, np.float32) for number in range(6)}
    for name, array in arrays.items():
        safetensors.numpy.save_file({name: array}, tmp_path / f"{name}.safetensors")
    told: list[int] = []
    with xferlib.stager("host", strict=True, device_limit=limit * nbytes) as stager:
        got = xferlib.load(
            sorted(tmp_path.iterdir()), stager, dtype="float16", progress=lambda done, total: told.append(done // nbytes)
        )
        for name, array in arrays.items():
            assert_same(got[name], array.astype(np.float16))
        assert told == list(range(7))
        # What never fits is refused all the same.
        np.save(tmp_path / "large.npy", np.zeros(limit * nbytes, np.float32))
        with pytest.raises(xferlib.AllocationError, match="device memory is full"):
            xferlib.load(tmp_path / "large.npy", stager, dtype="float16")
        assert stager.stats().device_nbytes == 0


@pytest.mark.parametrize(("count", "trims"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_the_stager_is_trimmed_when_so_much_was_converted_and_at_the_end(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, trims: int
) -> None:
    """Each time the device may have to wait."""
    nbytes = 1 << 20
    safetensors.numpy.save_file(
        {str(number): np.zeros(nbytes // 4, np.float32) for number in range(count)}, tmp_path / "a.safetensors"
    )
    monkeypatch.setattr("xferlib.files.load.PIECE_NBYTES", nbytes)
    monkeypatch.setattr("xferlib.files.load.TRIM_AFTER_NBYTES", 2 * nbytes)
    trimmed: list[Stager] = []
    monkeypatch.setattr(Stager, "trim", lambda stager: trimmed.append(stager))
    xferlib.load(tmp_path / "a.safetensors", stager, dtype="float16")
    assert trimmed == [stager] * trims


def test_small_arrays_that_stay_keep_no_memory_of_those_that_are_converted(tmp_path: Path) -> None:
    """Small ones that are put together share memory."""
    arrays: dict[str, Any] = {f"bias {number}": np.full(1000, number, np.float32) for number in range(500)}
    arrays["ids"] = np.arange(10, dtype=np.int32)
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    with xferlib.stager("host", strict=True) as stager:
        got = xferlib.load(tmp_path / "a.safetensors", stager, dtype="float16")
        assert 0 < stager.stats().device_nbytes <= 256 << 10
        assert_same(got["bias 499"], arrays["bias 499"].astype(np.float16))
        assert_same(got["ids"], arrays["ids"])


class Bare:
    """A device array that knows no conversion, as of some libraries."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype


class BareStager:
    """The host backend with such arrays."""

    name = "bare"

    def __init__(self) -> None:
        self.inner = open_stager()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def as_array(self, *args: Any, **options: Any) -> Bare:
        return Bare(self.inner.as_array(*args, **options))


def test_arrays_without_astype_are_refused_in_words_and_load_as_they_are(path: Path) -> None:
    backend: Any = BareStager()
    with xferlib.stager(backend) as stager:
        with pytest.raises(xferlib.CapabilityError, match="arrays of backend 'bare' have no astype"):
            xferlib.load(path, stager, dtype="float16")
        got = xferlib.load(path, stager)
        assert_same(got["a.bias"].array, ARRAYS["a.bias"])
        # Nothing is to be converted.
        assert_same(xferlib.load(path, stager, names=["ids"], dtype="float16")["ids"].array, ARRAYS["ids"])


def test_a_backend_may_convert_by_itself(path: Path) -> None:
    class Converting(BareStager):
        name = "converting"

        def convert(self, array: Bare, dtype: Any) -> Bare:
            return Bare(array.array.astype(dtype))

        def place(self, array: Bare, stream: object = None) -> Any:
            return self.inner.place(array.array, stream)

    backend: Any = Converting()
    with xferlib.stager(backend) as stager:
        assert_same(xferlib.load(path, stager, dtype="float16")["a.bias"].array, ARRAYS["a.bias"].astype(np.float16))


def test_a_conversion_that_fails_is_said_with_its_array(path: Path) -> None:
    class Full(np.ndarray[Any, Any]):
        def astype(self, *_: Any, **__: Any) -> Any:
            raise MemoryError("the device is full")

    class FullStager(BareStager):
        name = "full"

        def as_array(self, *args: Any, **options: Any) -> Any:
            return self.inner.as_array(*args, **options).view(Full)

    backend: Any = FullStager()
    with xferlib.stager(backend) as stager:
        with pytest.raises(xferlib.AllocationError, match=r"'a\.weight' could not be converted to float16: the device is full"):
            xferlib.load(path, stager, names=["a.weight"], dtype="float16")
        stager.trim()
        assert stager.stats().device_nbytes == 0


def test_a_conversion_that_fails_on_the_device_is_an_error_of_ours(stager: Stager, path: Path) -> None:
    class Puts:
        whole, backend = True, stager.backend
        patterns: ClassVar[dict[str, list[str]]] = {}

        def put(self, arrays: dict[str, Any], like: dict[str, Any]) -> xferlib.Transfer[Any]:
            return stager.put(arrays, borrow=True)

        def idle(self) -> None: ...

        def wait(self, arrays: list[Any]) -> None:
            raise stager.backend.failures[0]("the device is full")

        def trim(self) -> None: ...

    with pytest.raises(xferlib.XferError, match="arrays could not be converted: the device is full"):
        xferlib.load(path, Puts(), dtype="float16")
