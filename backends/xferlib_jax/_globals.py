"""Global arrays out of their shards, again and again: as `jax.make_array_from_single_device_arrays` makes them.

That looks at each shard, and derives again what is the same for every batch: two thirds of its time. The constructor behind it can
be told to do neither, and is private to JAX. It is tried on the first shards; if it does not do what is expected, it is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import jax

from xferlib_jax._stagers import Device

__all__ = ["GlobalArrays"]


@final
class GlobalArrays:
    """Makes the global arrays of one shape and dtype, over one sharding. Any thread."""

    def __init__(self, shape: tuple[int, ...], sharding: Any) -> None:
        self._shape = shape
        self._sharding = sharding
        self._known: tuple[Any, Any, list[Device]] | None = None
        """The private constructor, what it is told of the arrays, and the devices in its order."""
        self._tried = False

    @property
    def by_private_call(self) -> bool:
        """Whether arrays are made by JAX's private constructor."""
        return self._known is not None

    def __call__(self, shards: Mapping[Device, Any]) -> Any:
        """Return the array whose shards these are, one on each local device of the sharding, committed to these."""
        if self._known is not None:
            make, described, devices = self._known
            return make(described, self._sharding, [shards[device] for device in devices], committed=True, _skip_checks=True)
        array = jax.make_array_from_single_device_arrays(self._shape, self._sharding, list(shards.values()))
        if not self._tried:
            self._tried = True
            self._known = self._trial(array, shards)
        return array

    def _trial(self, array: Any, shards: Mapping[Device, Any]) -> tuple[Any, Any, list[Device]] | None:
        try:
            make, devices = type(array), [shard.device for shard in array.addressable_shards]
            made = make(array.aval, self._sharding, [shards[device] for device in devices], committed=True, _skip_checks=True)
            right = _looks(made) == _looks(array)
        except Exception:  # The constructor may take other arguments; each version says so in its own way.
            right = False
        return (make, array.aval, devices) if right else None


def _looks(array: Any) -> Any:
    shards = [(shard.device, shard.index, shard.data.devices(), shard.data.shape) for shard in array.addressable_shards]
    return array.shape, array.dtype, array.weak_type, array.sharding, array.committed, shards
