"""What a transfer and a loop say of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, succeeds, until


def engine(stager: xferlib.Stager) -> Any:
    backend: Any = stager.backend
    return backend.h2d


def test_a_transfer_says_where_it_goes_what_it_moves_and_whether_it_is_done(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned((2, 3), np.float32)
    with held(engine(stager)):
        transfer = stager.put({"x": source, "name": "rides along", "y": np.zeros(4, np.uint8)})
        assert repr(transfer) == "<Transfer H2D, in flight, float32[2, 3], uint8[4]>"
    assert until(lambda: repr(transfer) == "<Transfer H2D, done, float32[2, 3], uint8[4]>")
    back = stager.get(transfer.result()["x"])
    back.synchronize()
    assert repr(back) == "<Transfer D2H, done, float32[2, 3]>"
    assert repr(back.end) == "<Transfer D2H, done>"


def test_of_many_arrays_some_are_named(stager: xferlib.Stager) -> None:
    transfer = stager.put([np.zeros(number, np.uint8) for number in range(6)])
    transfer.synchronize()
    assert repr(transfer) == "<Transfer H2D, done, uint8[0], uint8[1], uint8[2], uint8[3], and 2 more>"


def test_what_is_borrowed_is_named_when_it_was_made(stager: xferlib.Stager) -> None:
    with held(engine(stager)):
        transfer = stager.put(np.zeros(3 << 20, np.uint8), borrow=True)
        assert repr(transfer) == "<Transfer H2D, in flight>"
    transfer.result()
    assert repr(transfer) == "<Transfer H2D, done, uint8[3145728]>"


def test_a_transfer_that_failed_says_so(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = stager.put(np.zeros(4))

    def fails() -> bool:
        raise RuntimeError("lost")

    monkeypatch.setattr(transfer, "_event", type("Lost", (), {"done": staticmethod(fails)})())
    assert repr(transfer) == "<Transfer H2D, failed, float64[4]>"


def test_a_transfer_of_the_parents_says_so() -> None:
    shown = succeeds(
        """
        import os
        import numpy as np, xferlib
        with xferlib.stager("host") as stager:
            transfer = stager.put(np.zeros(4))
            child = os.fork()
            if not child:
                print(repr(transfer), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """
    )
    assert shown == "<Transfer H2D, of another process, float64[4]>\n"


def test_a_loop_says_how_far_it_is(stager: xferlib.Stager) -> None:
    loop = xferlib.prefetch((np.zeros(3) for _ in range(5)), stager, 2)
    next(loop)
    assert until(lambda: repr(loop) == "<Prefetch, 1 taken, 2 ahead of 2>")
    list(loop)
    assert repr(loop) == "<Prefetch, 5 taken, spent>"
    other = xferlib.prefetch([np.zeros(3)], stager)
    other.close()
    assert repr(other) == "<Prefetch, 0 taken, closed>"
