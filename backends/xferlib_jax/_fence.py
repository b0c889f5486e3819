"""When the memory of a dropped array may be written again.

Since jax 0.11.2 the deleter of an imported buffer is called when the computations that take it have ended: that is all there is to
know. Before that, the deleter was called when the last reference in Python was gone, while computations could still read. With
these versions memory is fenced: a tiny computation goes into JAX's compute stream, behind all that was launched there, and our own
stream waits for its result.

When a stager is opened, a test finds out which of the two holds. It errs towards the fence, which is right for both.
`XFERLIB_JAX_REUSE` can say "deleter" or "fence" instead of the test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Any, final

import jax
import numpy as np

from xferlib.errors import BackendUnavailableError
from xferlib.tickets import Returns
from xferlib_jax._blocks import Block
from xferlib_jax._capsule import Capsules
from xferlib_jax._driver import Driver
from xferlib_jax._events import CudaEvent, EventPool
from xferlib_jax._exports import Export
from xferlib_jax._imports import Imports

__all__ = ["SWITCH", "Fences"]

SWITCH = "XFERLIB_JAX_REUSE"
BY_DELETER, BY_FENCE = "deleter", "fence"
DEFERRED_SINCE = (0, 11, 2)
TOKEN_NBYTES = 256
HELD_MICROSECONDS = 30_000


@final
class Fences:
    """Fences on one device's compute stream, by way of `stream`, one of our own. Any thread."""

    def __init__(self, device: Any, stream: int, events: EventPool, export: Export) -> None:
        self._stream = stream
        self._export = export
        self._events = events
        self._device = device
        self._token = _token(self._device)
        self.launch = _launcher(device)
        self.launch(self._token).block_until_ready()

    def make(self) -> CudaEvent:
        """Return an event that is reached when all that JAX has launched so far is done. 40 to 80 us."""
        if self._token.is_deleted():
            # Deleted by somebody who deleted every array of `jax.live_arrays()`.
            self._token = _token(self._device)
        result = self.launch(self._token)
        self._export(result, stream=self._stream)
        return self._events.record(self._stream)

    def are_needed(self, driver: Driver, block: Block, imports: Imports, capsules: Capsules) -> bool:
        """Tell whether fences are needed, by the switch or by a test in a block that nothing else uses now."""
        wanted = os.environ.get(SWITCH, "")
        if wanted == BY_FENCE:
            return True
        if wanted == BY_DELETER:
            return False
        if wanted:
            raise BackendUnavailableError(
                f"backend 'jax' cannot run here: {SWITCH}={wanted!r} is neither {BY_DELETER!r} nor {BY_FENCE!r}. Unset it"
            )
        version = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])
        if (
            version >= DEFERRED_SINCE
            and self._device not in _deferred
            and self._deleter_is_deferred(driver, block, imports, capsules)
        ):
            _deferred.add(self._device)
        return self._device not in _deferred

    def _deleter_is_deferred(self, driver: Driver, block: Block, imports: Imports, capsules: Capsules) -> bool:
        """Drop an array whose reader is held, and look whether its lease outlives the hold.

        The reader waits for a stream on which the C library sleeps, so the hold ends by itself, whatever waits for it.
        """
        sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        assert sleep is not None
        driver.call_on(self._stream, sleep, HELD_MICROSECONDS)
        hold = self._events.record(self._stream)
        leases = Returns()
        lease = leases.ticket(0)
        array = imports.adopt(block.address, (TOKEN_NBYTES,), np.dtype(np.uint8), order=hold.hold_back, lease=lease)
        result = self.launch(array)
        del lease, array
        deferred = self._outlives(hold, capsules, leases)
        result.block_until_ready()
        return deferred

    def _outlives(self, hold: CudaEvent, capsules: Capsules, leases: Returns) -> bool:
        looks = 0
        while True:
            capsules.sweep()
            has_ended = bool(leases)
            # Asked after the look, since what was seen may have happened after the hold.
            if hold.done():
                return looks > 0
            if has_ended:
                return False
            looks += 1


_deferred: set[Any] = set()
"""The devices of this process where the test has shown that no fences are needed. It takes as long as it holds a stream."""


@functools.cache
def _launcher(device: Any) -> Any:
    """Compile the tiny computation, once and for all. A call of it is a launch even inside a function that is being traced.

    It is kept: to give a compiled program back waits for all work on the device, so the end of a stager would wait for the user's.
    """
    return jax.jit(lambda token: token + np.uint8(1)).lower(_token(device)).compile()


def _token(device: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.zeros(TOKEN_NBYTES, np.uint8), device)
