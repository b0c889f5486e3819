"""Trees leaf by leaf: each source is held until its copy is done, and where the second fails nothing of the first is under way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import Gated, held, off_main, on_thread, tampered
from xferlib.staging.profile import StagingProfile


class Broke(Exception):
    """What the backend raises."""


@pytest.mark.parametrize("how", ["fresh", "into", "borrow"])
def test_a_put_whose_second_copy_cannot_start_raises_when_the_first_has_ended(how: str) -> None:
    backend = tampered(failures=(Broke,))
    started: list[int] = []

    def copy(dst: int, src: int, nbytes: int) -> None:
        if started:
            raise Broke("no more")
        started.append(nbytes)
        backend.inner.copy_h2d(dst, src, nbytes)

    backend.copy_h2d = copy
    with xferlib.stager(backend) as stager:
        sources: list[Any] = [stager.empty_pinned(100, np.uint8) for _ in range(2)]
        options: dict[str, Any] = {}
        if how == "into":
            options["into"] = [np.zeros(100, np.uint8) for _ in range(2)]
        elif how == "borrow":
            sources.append(np.zeros(2 << 20, np.uint8))
            options["borrow"] = True
        with held(backend.inner.h2d) as gate:
            putting = on_thread(lambda: stager.put(sources, **options))
            with pytest.raises(TimeoutError):
                putting.result(0.2)
            gate.set()
            with pytest.raises(xferlib.TransferError, match="no more"):
                putting.result(10)
    assert started == [100]


@pytest.mark.parametrize("given", [False, True])
def test_a_get_whose_second_copy_cannot_start_raises_when_the_first_has_ended(given: bool) -> None:
    backend = tampered(failures=(Broke,))
    started: list[int] = []

    def copy(dst: int, src: int, nbytes: int) -> None:
        if started:
            raise Broke("no more")
        started.append(nbytes)
        backend.inner.copy_d2h(dst, src, nbytes)

    backend.copy_d2h = copy
    with xferlib.stager(backend) as stager:
        arrays = [np.zeros(100, np.uint8) for _ in range(2)]
        out = [stager.empty_pinned(100, np.uint8) for _ in range(2)] if given else None
        with held(backend.inner.d2h) as gate:
            getting = on_thread(lambda: stager.get(arrays, out=out))
            with pytest.raises(TimeoutError):
                getting.result(0.2)
            gate.set()
            with pytest.raises(xferlib.TransferError, match="no more"):
                getting.result(10)
    assert started == [100]


@pytest.mark.parametrize("direction", ["put", "get"])
def test_what_a_failed_start_left_under_way_is_kept_for_good_where_nobody_knows_its_end(direction: str) -> None:
    """The first copy may still read and write, and no event says until when."""
    copy, record = ("copy_h2d", "record_h2d") if direction == "put" else ("copy_d2h", "record_d2h")
    backend = tampered(failures=(Broke,))
    started: list[int] = []

    def once(dst: int, src: int, nbytes: int) -> None:
        if started:
            raise Broke("no more")
        started.append(nbytes)
        getattr(backend.inner, copy)(dst, src, nbytes)

    def nothing() -> Any:
        raise Broke("no event")

    setattr(backend, copy, once)
    setattr(backend, record, nothing)

    def begin(stager: xferlib.Stager) -> list[weakref.ref[Any]]:
        device = [np.zeros(100, np.uint8) for _ in range(2)]
        host = [stager.empty_pinned(100, np.uint8) for _ in range(2)]
        with pytest.raises(xferlib.TransferError, match="no more"):
            if direction == "put":
                stager.put(host, into=device)
            else:
                stager.get(device, out=host)
        # Of the second no copy was started.
        return [weakref.ref(device[0]), weakref.ref(host[0])]

    with xferlib.stager(backend) as stager:
        kept = begin(stager)
        gc.collect()
        assert all(ref() is not None for ref in kept)


@pytest.mark.parametrize("into", [False, True])
def test_every_pinned_leaf_is_held_until_the_copies_are_done(stager: xferlib.Stager, into: bool) -> None:
    sources = [stager.empty_pinned(4096, np.uint8) for _ in range(3)]
    for number, source in enumerate(sources, 1):
        source[:] = number
    targets = [np.zeros(4096, np.uint8) for _ in range(3)] if into else None
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's own
        transfer = stager.put(sources, into=targets)
        del sources, source
        others = [stager.empty_pinned(4096, np.uint8) for _ in range(8)]
        for other in others:
            other[:] = 99
    assert [set(array.tolist()) for array in transfer.result()] == [{1}, {2}, {3}]


@pytest.mark.parametrize("how", ["fresh", "into", "borrow", "one"])
def test_an_empty_leaf_is_no_copy(how: str) -> None:
    """A backend is never asked to copy nothing."""
    backend = tampered()
    asked: list[int] = []

    def copy(dst: int, src: int, nbytes: int) -> None:
        asked.append(nbytes)
        backend.inner.copy_h2d(dst, src, nbytes)

    backend.copy_h2d = copy
    with xferlib.stager(backend) as stager:
        leaves: list[Any] = [stager.empty_pinned(0, np.uint8), stager.empty_pinned(100, np.uint8), np.zeros((3, 0))]
        options: dict[str, Any] = {}
        if how == "into":
            options["into"] = [np.zeros_like(leaf) for leaf in leaves]
        elif how == "borrow":
            leaves.append(np.zeros(2 << 20, np.uint8))
            options["borrow"] = True
        if how == "one":
            leaves = leaves[:1]
        got = stager.put(leaves[0], **options).result() if how == "one" else stager.put(leaves, **options).result()
        assert [array.shape for array in ([got] if how == "one" else got)] == [leaf.shape for leaf in leaves]
    assert all(nbytes > 0 for nbytes in asked)
    assert (asked != []) is (how != "one")


def test_memory_of_every_borrowed_leaf_is_kept_until_its_copy_was_started() -> None:
    gated = Gated(when=off_main)
    sizes = [2 << 20, 3 << 20]
    with xferlib.stager(gated.backend, staging=StagingProfile(4, 1 << 20, 1 << 19)) as stager:
        # Each size was put once: its memory is what a put of that size finds.
        stager.put([stager.empty_pinned(size, np.uint8) for size in sizes]).synchronize()
        stager.put([np.full(size, 7, np.uint8) for size in sizes], borrow=True)
        assert gated.entered.wait(10)
        pinned = [stager.empty_pinned(size, np.uint8) for size in sizes]
        for array in pinned:
            array[:] = 1
        kept = [stager.put(array).result() for array in pinned]
        gated.gate.set()
        stager.close()
        assert all((array == 1).all() for array in kept)
