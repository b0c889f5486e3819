"""Wrong arguments as strangers give them: each message says what was expected, and what to do. More of them: `test_bad_input`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered

ARRAY = np.ones((4, 4), np.float32)
SPEC = ((4,), np.uint8)

Call: TypeAlias = Callable[[xferlib.Stager], object]

NO_ARRAY = "which is neither an array nor something that rides along, such as text and numbers. "
PUBLIC: Any = xferlib
"""For arguments that a type checker refuses, too."""
WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "a stager for a backend": (lambda s: PUBLIC.stager(s), TypeError, r"<Stager 'host'.*is a stager already\. Use it as it is"),
    "text for strict": (lambda s: PUBLIC.stager("host", strict="no"), TypeError, "strict='no': expected True or False"),
    "text for debug": (lambda s: PUBLIC.stager("host", debug="no"), TypeError, "debug='no': expected True or False"),
    "a tree to put one array into": (lambda s: s.put(ARRAY, into={"x": ARRAY}), TypeError, r"into, got {'x': float32\[4, 4\]}"),
    "an iterator to get": (lambda s: s.get(iter([ARRAY])), TypeError, r"list_iterator, .*xferlib\.drain\(results, stager\)$"),
    "a function to get": (lambda s: s.get(len), TypeError, f"the function len, {NO_ARRAY}Pass what it returns, or leave it out"),
    "a class to get": (lambda s: s.get([Batches]), TypeError, f"the class Batches, {NO_ARRAY}Pass what it returns, or leave"),
    "an object to get": (lambda s: s.get({"x": object()}), TypeError, f"builtins.object, {NO_ARRAY}Leave it out of the tree$"),
    "a future to get": (lambda s: s.get(Future()), TypeError, rf"_base\.Future, {NO_ARRAY}Pass what its result\(\) returns$"),
    "what has a result and is no future": (
        lambda s: s.get(Finished()),
        TypeError,
        f"Finished, {NO_ARRAY}Leave it out of the tree$",
    ),
    "a cached property to get": (lambda s: s.get(cached_property(len)), TypeError, f"functools.cached_property, {NO_ARRAY}Leave"),
    "what takes itself for a class": (lambda s: s.get(Pretender()), TypeError, f"Pretender, {NO_ARRAY}Leave"),
    "what lists no names": (lambda s: s.get([Unlisted()]), TypeError, f"Unlisted, {NO_ARRAY}Leave"),
    "a list of a class of its own": (lambda s: s.get(Listed([1.0])), TypeError, r"Convert it with numpy\.asarray$"),
    "bytes to get": (lambda s: s.get(memoryview(b"a")), TypeError, r"Convert it with numpy\.asarray$"),
    "a masked array to get": (lambda s: s.get(np.ma.zeros(3)), TypeError, r"Convert it with array\.filled\(\)$"),
    "text for out": (lambda s: s.get(ARRAY, out="x"), TypeError, r"Pass numpy\.empty\(shape, dtype\), or no out at all$"),
    "out of another dtype": (lambda s: s.get(ARRAY, out=np.zeros((4, 4))), ValueError, "convert it afterwards$"),
    "a function to put": (lambda s: s.put(print), TypeError, r"got builtins\.builtin_function_or_method\. Pass what it returns$"),
    "text for a timeout": (
        lambda s: PUBLIC.Stager.put(s, ARRAY).result("soon"),
        TypeError,
        "timeout='soon': expected seconds, or None",
    ),
    "no number for a timeout": (
        lambda s: PUBLIC.Stager.put(s, ARRAY).result(float("nan")),
        ValueError,
        "timeout=nan: expected seconds, or None",
    ),
    "text for batches": (
        lambda s: PUBLIC.prefetch("folder", s),
        TypeError,
        "batches='folder': .*one tree of arrays after another",
    ),
    "text for results": (lambda s: PUBLIC.drain("folder", s), TypeError, "results='folder': .*got text$"),
    "one number for batches": (lambda s: PUBLIC.prefetch(np.array(1), s), TypeError, r"batches: .*Pass a list of it, \[array\]"),
    "a class for batches": (lambda s: PUBLIC.prefetch(Batches, s), TypeError, r"batches: .*call it, as in Batches\(\)"),
    "text for the rounds": (lambda s: PUBLIC.measure_overlap(s, rounds="x"), TypeError, "rounds='x': expected a whole number"),
    "text for the steps": (lambda s: PUBLIC.assert_overlaps(print, steps="x"), TypeError, "steps='x': expected a whole number"),
    "no warm-up": (lambda s: PUBLIC.assert_overlaps(print, warmup=None), TypeError, "warmup=None: expected a whole number"),
    "half a byte": (lambda s: PUBLIC.assert_overlaps(print, nbytes=0.5), TypeError, "nbytes=0.5: expected a whole number"),
    "text for a device": (lambda s: PUBLIC.assert_overlaps(print, device="x"), TypeError, "device='x': expected a whole number"),
    "a step that was called": (lambda s: PUBLIC.assert_overlaps(None), TypeError, r"without calling it, assert_overlaps\(step\)$"),
    "an iterator for a step": (
        lambda s: PUBLIC.assert_overlaps(iter([])),
        TypeError,
        r"list_iterator\. .*pass its method __next__$",
    ),
    "a stager for the path of a trace": (lambda s: PUBLIC.trace(s), TypeError, "path=<Stager .*expected the path of a file"),
    "one group for a tree": (lambda s: PUBLIC.HostTree(ARRAY, s), TypeError, r"a dict of groups.*, got float32\[4, 4\]"),
}


class Finished:
    """What has a result, and was never under way."""

    def result(self) -> None:
        """Return nothing."""


class Pretender:
    """What names another class as its own."""

    @property  # type: ignore[misc]  # on purpose
    def __class__(self) -> type:
        return type


class Secretive(type):
    """Classes that do not say what they have."""

    def __dir__(cls) -> NoReturn:
        raise RuntimeError("no names are given")


class Unlisted(metaclass=Secretive):
    """One of them."""


class Listed(list[Any]):
    """A list that no tree library takes apart."""


class Batches:
    """A loader that was not made."""

    def __iter__(self) -> Iterator[Any]:
        return iter([ARRAY])


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_told_what_to_do(stager: xferlib.Stager, call: Call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"(?sm){words}"):
        call(stager)


@pytest.mark.parametrize(
    "offered", ["shape", "dtype", "__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__"]
)
def test_what_may_be_an_array_of_some_library_is_for_the_backend_to_judge(stager: xferlib.Stager, offered: str) -> None:
    of_class = type("Other", (), {offered: None})()
    for array in (of_class, SimpleNamespace(**{offered: None})):
        with pytest.raises(TypeError, match=r"^the device arrays of backend 'host' are .*Convert it with numpy\.asarray"):
            stager.get(array)
    with pytest.raises(TypeError, match="got the class Other, which is neither"):
        stager.get(type(of_class))


def test_of_a_backend_that_describes_its_arrays_all_else_is_asked_as_well() -> None:
    def as_source(array: object, stream: object = None) -> NoReturn:
        raise TypeError("it has another name for this")

    backend = tampered(name="describes", describe=lambda array: None, as_source=as_source)
    with xferlib.stager(backend) as stager, pytest.raises(TypeError, match="another name for this"):
        stager.get([object()])


def test_nothing_to_collate_is_refused_before_a_slot_is_acquired(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, SPEC, slots=1) as ring, ring.acquire(), pytest.raises(TypeError, match=r"items: .*got None"):
        # Otherwise it would wait for the slot.
        PUBLIC.Ring.collate(ring, None)


def test_a_number_for_names_is_refused(stager: xferlib.Stager, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=ARRAY)
    with pytest.raises(TypeError, match="names=3: expected a list of names"):
        PUBLIC.load(tmp_path / "a.npz", stager, names=3)


def test_a_folder_for_a_trace_is_refused_before_the_block(tmp_path: Path) -> None:
    ran: list[None] = []
    with (
        pytest.raises(IsADirectoryError, match=r"is a folder\. Name a file in it, such as '.*trace\.json'"),
        xferlib.trace(tmp_path),
    ):
        ran.append(None)
    assert not ran


@pytest.mark.parametrize("shape", [np.array([2, 3]), np.array(3), np.int64(3), (np.int64(2), 3), [2, 3]])
def test_a_shape_may_be_an_array_of_whole_numbers(stager: xferlib.Stager, shape: Any) -> None:
    assert stager.empty_pinned(shape, np.uint8).shape == np.zeros(shape).shape
