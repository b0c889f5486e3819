"""64-bit arrays of a batch, as JAX would have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import xferlib
from xferlib.stager import Stager

pytestmark = pytest.mark.usefixtures("stager")


def test_a_loader_of_wide_arrays_gives_what_jax_would_make_of_them(stager: Stager) -> None:
    import jax
    import xferlib_jax

    batches = [{"label": np.arange(4) - number, "x": np.full(4, 0.1), "name": "x", "n": np.int64(number)} for number in range(3)]
    with jax.enable_x64(False):
        expected = [{name: jax.device_put(batch[name]) for name in ("label", "x", "n")} for batch in batches]
    for found, other in zip(xferlib.prefetch(map(xferlib_jax.narrowed, batches), stager), expected, strict=True):
        assert found["name"] == "x"
        for name, array in other.items():
            assert found[name].dtype == array.dtype
            assert (found[name] == array).all()


def test_what_has_no_wide_array_and_all_where_jax_has_them_is_the_same_object() -> None:
    import jax
    from xferlib_jax import narrowed

    wide: Any = [np.arange(3), xferlib.Host(np.arange(3))]
    tree = {"x": np.ones(3, np.float32), "more": [None, "text", 3, wide[1]]}
    with jax.enable_x64(False):
        assert narrowed(tree) is tree
        assert narrowed(wide)[1] is wide[1]
    with jax.enable_x64(True):
        assert narrowed(wide) is wide


def test_dataclasses_come_back_as_they_were() -> None:
    import jax
    from xferlib_jax import narrowed

    @dataclasses.dataclass
    class Sample:
        label: Any
        name: str

    with jax.enable_x64(False):
        found = narrowed({"sample": Sample(np.zeros((2, 0), np.uint64), "x")})["sample"]
    assert isinstance(found, Sample)
    assert (found.label.dtype, found.label.shape, found.name) == (np.uint32, (2, 0), "x")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (
            np.array([0, 1 << 31]),
            r"tree\['y'\] has integers from 0 to 2147483648, and int32 holds those from -2147483648 to 2147483647",
        ),
        (np.array([-(1 << 31) - 1]), "from -2147483649 to -2147483649"),
        (np.array([1 << 32], np.uint64), "uint32 holds those from 0 to 4294967295"),
        (np.int64(1 << 40), "int32 holds"),
    ],
    ids=str,
)
def test_integers_that_do_not_fit_are_refused(array: Any, words: str) -> None:
    import jax
    from xferlib_jax import narrowed

    with jax.enable_x64(False):
        with pytest.raises(ValueError, match=words):
            narrowed({"x": np.ones(2), "y": array})
        ends = np.array([-(1 << 31), (1 << 31) - 1])
        assert narrowed(ends).tolist() == ends.tolist()


def test_the_refusal_of_a_wide_array_says_how_to_narrow_a_loader(stager: Stager) -> None:
    import jax

    words = r'array.astype\("int32"\), or all batches of a loader, map\(xferlib_jax.narrowed, loader\)'
    with jax.enable_x64(False), pytest.raises(TypeError, match=words):
        stager.put(np.arange(3))
