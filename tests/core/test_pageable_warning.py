"""A put that makes its caller wait says so: where it was called, why, and what to do; a strict stager refuses it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered
from xferlib import SynchronousTransferWarning
from xferlib.pageable_warning import WARN_FROM_NBYTES
from xferlib.stager import Stager

LARGE = np.zeros(WARN_FROM_NBYTES, np.uint8)


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host") as stager:
        yield stager


@pytest.fixture
def strict() -> Iterator[Stager]:
    with xferlib.stager("host", strict=True) as stager:
        yield stager


def pinned(stager: Stager, like: np.ndarray) -> np.ndarray:
    array = stager.empty_pinned(like.shape, like.dtype)
    array[...] = like
    return array


def test_the_callers_line_the_reason_and_the_remedy_are_named(stager: Stager) -> None:
    for tree in (LARGE, {"a": [LARGE]}):
        with pytest.warns(SynchronousTransferWarning, match=r"not in pinned memory.*empty_pinned.*stager.pin.*borrow=True") as told:
            stager.put(tree).synchronize()
        assert [warning.filename for warning in told] == [__file__]


def test_a_put_by_a_backends_own_code_names_the_line_that_called_it(stager: Stager) -> None:
    names: dict[str, Any] = {"__name__": "xferlib_somewhere.loop"}
    exec("def put(stager, array): return stager.put(array)", names)
    with pytest.warns(SynchronousTransferWarning) as told:
        names["put"](stager, LARGE).synchronize()
    assert [warning.filename for warning in told] == [__file__]


def test_what_goes_into_arrays_of_the_callers_has_a_remedy_of_its_own(stager: Stager) -> None:
    for tree, into in ((LARGE, LARGE.copy()), ([LARGE], [LARGE.copy()])):
        with pytest.warns(SynchronousTransferWarning, match=r"not in pinned memory.*stager.pin\(array\)$"):
            stager.put(tree, into=into).synchronize()


def test_an_array_that_is_not_contiguous_has_a_remedy_of_its_own(stager: Stager) -> None:
    columns = pinned(stager, np.zeros((1000, 1000), np.uint8))[:, ::2]
    with pytest.warns(SynchronousTransferWarning, match=r"not contiguous.*C order"):
        stager.put(columns).synchronize()


def test_a_loop_is_told_once_whatever_its_batches_sizes(stager: Stager) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", SynchronousTransferWarning)
        for length in range(5):
            stager.put(np.zeros(WARN_FROM_NBYTES + length, np.uint8)).synchronize()
        assert len(told) == 1
        stager.put(LARGE).synchronize()
        assert len(told) == 2


def ahead(stager: Stager, done: list[Any]) -> Any:
    """Return what a thread of the package's own may run."""
    namespace: dict[str, Any] = {"__name__": "xferlib.ahead", "stager": stager, "done": done, "array": LARGE}
    exec("def run(): done.append(stager.put(array))", namespace)
    return namespace["run"]


def quiet_puts(stager: Stager) -> dict[str, Any]:
    """Return calls that make nobody wait, or not for long."""
    mine = LARGE.copy()
    return {
        "pinned": lambda: stager.put(pinned(stager, LARGE)),
        "empty": lambda: stager.put(np.zeros((0, 3))),
        "pinned in place": lambda: _put_pinned(stager, mine),
        "small": lambda: stager.put(LARGE[1:].copy()),
        "small leaves": lambda: stager.put([LARGE[:100].copy()] * 10 + [pinned(stager, LARGE)]),
        "get": lambda: stager.get(LARGE),
        "get into pageable memory": lambda: stager.get(LARGE, out=mine),
        "borrowed": lambda: stager.put(LARGE, borrow=True),
        "borrowed, small": lambda: stager.put(LARGE[:100].copy(), borrow=True),
        "borrowed, a tree": lambda: stager.put({"a": LARGE, "b": LARGE[:8]}, borrow=True),
    }


def _put_pinned(stager: Stager, array: np.ndarray) -> Any:
    with stager.pin(array):
        transfer = stager.put(array)
        transfer.synchronize()
        return transfer


@pytest.mark.parametrize("call", quiet_puts(None))  # type: ignore[arg-type]  # Only the names.
@pytest.mark.filterwarnings("error::xferlib.SynchronousTransferWarning")
def test_what_makes_nobody_wait_is_quiet(stager: Stager, call: str) -> None:
    quiet_puts(stager)[call]().synchronize()


@pytest.mark.filterwarnings("error::xferlib.SynchronousTransferWarning")
def test_a_thread_that_does_nothing_else_makes_nobody_wait(stager: Stager, strict: Stager) -> None:
    for each in (stager, strict):
        done: list[Any] = []
        thread = threading.Thread(target=ahead(each, done))
        thread.start()
        thread.join()
        done[0].synchronize()
        with ThreadPoolExecutor(1) as pool, pytest.raises((SynchronousTransferWarning, ValueError)):
            pool.submit(lambda each=each: each.put(LARGE)).result()  # type: ignore[misc]  # A default binds the loop's variable.


@pytest.mark.filterwarnings("error::xferlib.SynchronousTransferWarning")
def test_small_leaves_that_make_much_together_are_not_quiet(stager: Stager) -> None:
    leaves = [np.zeros(WARN_FROM_NBYTES // 4, np.uint8) for _ in range(4)]
    stager.put(leaves[:3]).synchronize()
    with pytest.raises(SynchronousTransferWarning):
        stager.put(leaves)


def test_a_strict_stager_refuses_whatever_the_size_and_starts_nothing(strict: Stager) -> None:
    for array in (LARGE, np.float32(1)):
        with pytest.raises(ValueError, match=r"this stager is strict.*empty_pinned"):
            strict.put(array)
    with pytest.raises(ValueError, match="strict") as caught:
        strict.put({"good": pinned(strict, LARGE), "bad": [None, LARGE]})
    assert caught.value.__notes__ == ["at tree.bad[1]"]
    stats = strict.stats()
    assert (stats.h2d_nbytes, stats.synchronous) == (0, 0)


@pytest.mark.parametrize("call", [call for call in quiet_puts(None) if not call.startswith("small")])  # type: ignore[arg-type]
def test_a_strict_stager_takes_what_makes_nobody_wait(strict: Stager, call: str) -> None:
    quiet_puts(strict)[call]().synchronize()


def test_what_passed_through_the_cpu_is_counted(stager: Stager) -> None:
    before = stager.stats().synchronous
    with pytest.warns(SynchronousTransferWarning):
        stager.put([LARGE, pinned(stager, LARGE)]).synchronize()
    assert stager.stats().synchronous == before + 1


def test_strictness_is_no_matter_of_the_backend() -> None:
    with xferlib.stager(tampered(), strict=True) as stager, pytest.raises(ValueError, match="strict"):
        stager.put(LARGE)
