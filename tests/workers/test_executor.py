"""The thread that works for a ring: what comes back from it, and what is left of that."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.pipeline.steps import until
from tests.workers.fills import OwnError
from xferlib.pipeline.workers.executor import Executor


def fail() -> None:
    raise OwnError("something", 7)


def test_an_error_comes_back_and_is_gone_when_it_is_dropped() -> None:
    executor = Executor(lambda: None)
    ticket = executor.start()
    gc.disable()
    try:
        with pytest.raises(OwnError) as caught:
            executor.call(fail)
        left = weakref.ref(caught.value)
        del caught
        # The thread lets go of it behind its answer. The collector never comes: it could come to nobody's help.
        until(lambda: left() is None)
    finally:
        gc.enable()
        executor.end()
    assert ticket is not None
