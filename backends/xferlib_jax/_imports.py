"""How memory becomes a JAX array, again and again: as `jax.dlpack.from_dlpack` does, without what it does for foreign arrays.

JAX imports on four streams, in turn; each is first in, first out. While one of them waits for a copy that is held up, or for other
work, every fourth import would wait with it. An idle stream is one call away.

The import itself is private to JAX. It is tried when a stager is opened. If it does not do what is expected, the public import does
the same in twice the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from xferlib_jax._arrays import JaxArray, adopt, dlpack_code
from xferlib_jax._capsule import Capsules
from xferlib_jax._driver import Driver, wait_for_releases

__all__ = ["Imports"]

ASKED = 9


@final
class Imports:
    """Imports memory of one device. `driver` is None where JAX has no streams. Any thread."""

    def __init__(self, device: Any, dlpack: tuple[int, int], capsules: Capsules, driver: Driver | None) -> None:
        self._device = device
        self._dlpack = dlpack
        self._capsules = capsules
        self._has_streams = driver is not None
        self._take: Callable[[], int] | None = None
        if driver is not None:
            self._is_idle = driver.is_idle
            self._take = getattr(device, "get_stream_for_external_ready_events", None)
        self._next_of = self._turns()
        self._ordered: tuple[Callable[[Any], None] | None, int | None] = (None, None)
        """What a stream was last made to wait for, and that stream."""
        self._convert: Callable[..., Any] | None = None

    @property
    def by_private_call(self) -> bool:
        """Whether arrays are made by JAX's private import."""
        return self._convert is not None

    def try_private_call(self, address: int) -> None:
        """Use the private import if it works, tried on 256 bytes at this address, which nothing else uses now."""
        if self._has_streams and self._take is None:
            return  # Nobody could say which stream to make wait.
        try:
            from jaxlib import _jax

            self._convert = _jax.dlpack_managed_tensor_to_buffer
            array = self.adopt(address, (8, 8), np.dtype(np.int32), order=None, lease=None)
            right = array.shape == (8, 8) and array.dtype == np.int32 and array.device == self._device and array.committed
            array.block_until_ready()
        except Exception:  # The import may be gone, or take other arguments; each version says so in its own way.
            right = False
        if not right:
            self._convert = None

    def adopt(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, order: Callable[[Any], None] | None, lease: object
    ) -> JaxArray:
        """See `xferlib_jax._arrays.adopt`."""
        wait_for_releases()
        if self._convert is None:
            self._skip_busy()
            return adopt(self._capsules, address, shape, dtype, device=self._dlpack, order=order, lease=lease)
        code, bits = dlpack_code(dtype)
        stream = self._stream_behind(order)
        return self._capsules.lend(
            address, shape, code, bits, self._dlpack, lease, self._convert, self._device, stream, None, self._dlpack[0]
        )

    def adopt_all(
        self,
        address: int,
        places: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]],
        *,
        order: Callable[[Any], None] | None,
        lease: object,
    ) -> list[JaxArray]:
        """Adopt several arrays of one block, each at an offset from its address. They wait for the same, so one stream serves all:
        to find an idle one for each, and to make it wait, would take as long as the import."""
        if self._convert is None:
            return [self.adopt(address + offset, shape, dtype, order=order, lease=lease) for offset, shape, dtype in places]
        wait_for_releases()
        stream = self._stream_behind(order)
        arrays: list[JaxArray] = []
        for offset, shape, dtype in places:
            code, bits = dlpack_code(dtype)
            arrays.append(
                self._capsules.lend(
                    address + offset,
                    shape,
                    code,
                    bits,
                    self._dlpack,
                    lease,
                    self._convert,
                    self._device,
                    stream,
                    None,
                    self._dlpack[0],
                )
            )
        return arrays

    def _stream_behind(self, order: Callable[[Any], None] | None) -> int | None:
        """Return a stream to import on, made to wait by `order`.

        The arrays of one put wait for the same event, and are imported one after the other: once is enough for all of them. While
        the event is noted here, nobody records it anew.
        """
        if order is None:
            return self._idle_stream()
        known, stream = self._ordered
        if known != order:
            stream = self._idle_stream()
            order(stream)
            self._ordered = order, stream
        return stream

    def _idle_stream(self) -> int | None:
        """Return a stream to import on: the first that has nothing to do, or the next in turn if all were busy."""
        take = self._take
        if take is None:
            return None
        stream = take()
        for _ in range(len(self._next_of) - 1):
            if self._is_idle(stream):
                break
            stream = take()
        return stream

    def _skip_busy(self) -> None:
        """Take turns until the next import is on an idle stream. Only a hint: another thread may take the turn in between."""
        if self._take is None:
            return
        for _ in self._next_of:
            following = self._next_of.get(self._take())
            if following is None or self._is_idle(following):
                return

    def _turns(self) -> dict[int, int]:
        """Return which stream follows which; nothing if they do not come in turn."""
        if self._take is None:
            return {}
        seen = [self._take() for _ in range(ASKED)]
        next_of = dict(itertools.pairwise(seen))
        return next_of if [next_of[stream] for stream in seen[:-1]] == seen[1:] else {}
