"""A backend that fails to give memory back: its own error is translated like every other, and the call may be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered
from xferlib.checks import translated


class Broke(Exception):
    """What the backend's framework raises."""


class Failing:
    """A host backend of which one method fails while `broken` is set."""

    def __init__(self, method: str) -> None:
        self.broken = False
        self.backend = tampered(failures=(Broke,), **{method: self._call})
        self._method = method

    def _call(self, *arguments: Any) -> Any:
        if self.broken:
            raise Broke("on purpose")
        return getattr(self.backend.inner, self._method)(*arguments)


def trim(stager: xferlib.Stager) -> Callable[[], None]:
    stager.empty_pinned(1000, np.uint8)
    stager.put(np.ones(1000)).synchronize()
    return stager.trim


def unpin(stager: xferlib.Stager) -> Callable[[], None]:
    return stager.pin(np.ones(1000)).close


@pytest.mark.parametrize(
    ("begin", "method", "words"),
    [
        (trim, "free_pinned", "idle memory could not be given back: on purpose"),
        (trim, "sweep", "idle memory could not be given back: on purpose"),
        (unpin, "unpin", "memory could not be unlocked: on purpose"),
    ],
)
def test_what_a_backend_raises_is_translated_and_the_next_call_succeeds(
    begin: Callable[[xferlib.Stager], Callable[[], None]], method: str, words: str
) -> None:
    failing = Failing(method)
    with xferlib.stager(failing.backend) as stager:
        give_back = begin(stager)
        failing.broken = True
        with pytest.raises(xferlib.XferError, match=words) as told:
            give_back()
        assert isinstance(told.value.__cause__, Broke)
        failing.broken = False
        give_back()
        assert stager.stats().pinned_used_nbytes == 0


def test_a_close_that_could_not_give_all_back_says_so_and_is_done() -> None:
    failing = Failing("free_pinned")
    stager = xferlib.stager(failing.backend)
    stager.empty_pinned(1000, np.uint8)
    failing.broken = True
    with pytest.raises(xferlib.XferError, match="not all of the stager's memory could be given back: on purpose"):
        stager.close()
    stager.close()
    with pytest.raises(xferlib.ClosedError):
        stager.put(np.ones(3))


def test_an_error_of_ours_stays_what_it_is() -> None:
    refused = xferlib.CapabilityError("not here")
    with pytest.raises(xferlib.CapabilityError) as told, translated((Exception,), "something else"):
        raise refused
    assert told.value is refused
