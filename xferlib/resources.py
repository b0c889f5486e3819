"""What a stager is made of, and how it is given back: by `close`, by whoever finds the stager dropped, or at exit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from operator import methodcaller
from typing import Any, final

from xferlib.checks import translated
from xferlib.debug import SourceWatch
from xferlib.ledger import Ledger
from xferlib.memory.device_pool import DevicePool
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.memory.registered import Pins
from xferlib.protocol import HostStager
from xferlib.staging.pageable import Staging
from xferlib.uninterrupted import uninterrupted

__all__ = ["StagerResources", "before_closing", "close_dropped", "owns"]

before_closing: list[Callable[[], None]] = []
"""Each is called before a stager closes, to wait until no thread that nobody holds any more is inside one of its calls."""


@final
class StagerResources:
    """What a stager is made of, and gives back when it is closed. It refers to no stager, so it may outlive one that is dropped."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self.backend = backend
        self.failures = backend.failures
        self.owns_backend = self.closed = False
        self.ledger: Ledger | None = None
        self.pool: PinnedPool | None = None
        self.blocks: DevicePool | None = None
        self.staging: Staging | None = None
        self.pins: Pins | None = None
        self.source_watch: SourceWatch | None = None
        self._giving_back = threading.RLock()

    def enter(self) -> None:
        """Note that these are to be given back at exit, if nobody does so before."""
        _entered[id(self)] = self

    def close(self) -> None:
        """Do what `Stager.close` does, for whoever dropped the stager. Any thread."""
        for wait in before_closing:
            wait()
        self.give_back()

    def give_back(self) -> None:
        """Wait for what is in flight, and give everything back, once. Any thread; after an interrupt it may be called again."""
        if self.ledger is not None and not self.closed:
            self.ledger.wait_all()
            if self.pins is not None:
                self.pins.wait_all()
        uninterrupted(self._give_back)

    def _give_back(self) -> None:
        """Take everything apart, once. On a thread that no interrupt comes to."""
        with self._giving_back:
            if self.closed:
                return
            self.closed = True
            with translated(self.failures, "not all of the stager's memory could be given back"), ExitStack() as steps:
                self._list(steps)

    def _list(self, steps: ExitStack) -> None:
        """List what is to be done: last in, first out, and each of them whatever those before it raise."""
        # Until all of it is done the end of the interpreter waits for it.
        steps.callback(_entered.pop, id(self), None)
        backend = self.backend if self.owns_backend else None
        for resource in (backend, self.blocks, self.pool, self.pins, self.staging, self.ledger, self.source_watch):
            if resource is not None:
                # `close` is looked up only then: a backend that has none keeps nothing else open.
                steps.callback(methodcaller("close"), resource)


_entered: dict[int, StagerResources] = {}
"""The resources of open or dropped stagers that are to be given back, or are being given back, by their `id`."""
# What is the parent's is not given back in a forked child.
os.register_at_fork(after_in_child=_entered.clear)


def owns(backend: HostStager[Any]) -> bool:
    """Tell whether a stager, perhaps one that is dropped, is going to close this backend. Any thread."""
    return any(resources.owns_backend and resources.backend is backend for resources in list(_entered.values()))


def close_dropped() -> None:
    """Close what is left of stagers that were dropped, or whose closing was interrupted. At exit."""
    with ExitStack() as steps:
        for resources in list(_entered.values()):
            steps.callback(resources.close)
