"""Which part of a host array goes to which device: plans made from shapes alone, and views cut by these plans.

Nothing is copied here except what must be laid out anew to be cut, and nothing is started.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from xferlib_jax._stagers import Device

__all__ = ["Group", "LeafPlan", "Parts", "local_devices_of", "plan_leaf", "plan_whole_leaf"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = tuple[int, ...]

WORTH_SPLITTING = 128 << 10
"""Bytes of a replicated shard. Below that, sending it to every device takes less time than gathering it."""


@final
@dataclass(frozen=True)
class Parts:
    """How the devices that need the same shard divide it: by rows where those divide evenly, else item by item."""

    shape: Shape
    """Of the shard."""
    by_rows: bool
    step: int
    """Rows, or items, of each part."""
    overlap: int
    """How much of the last part the part before it contains as well: all parts are of one size."""

    def cut(self, shard: Array, number: int) -> Array:
        """Return a part. `shard` is laid out by `lay`."""
        start = number * self.step
        if start + self.step > len(shard):
            start -= self.overlap
        return shard[start : start + self.step]

    def lay(self, shard: Array) -> Array:
        """Return the shard in the form that is cut: a view, unless it is cut by items and is not contiguous."""
        return shard if self.by_rows else shard.reshape(-1)

    @property
    def part_shape(self) -> Shape:
        """The shape of each part."""
        return (self.step, *self.shape[1:]) if self.by_rows else (self.step,)


@final
@dataclass(frozen=True)
class Group:
    """Local devices that need the same shard, and where that is in the host's array: axes at the end that it has whole are left
    out."""

    index: tuple[slice, ...]
    devices: tuple[Device, ...]


@final
@dataclass(frozen=True)
class LeafPlan:
    """Where the bytes of one leaf go. `parts`: None where every device pulls its whole shard."""

    shape: Shape
    """Of the global array."""
    sharding: Any
    dtype: np.dtype[Any]
    groups: tuple[Group, ...]
    parts: Parts | None

    def views(self, array: Array) -> Iterator[tuple[Device, Array]]:
        """Yield what each device pulls."""
        for group in self.groups:
            # The dots make it a view also where there is no axis.
            index: Any = (*group.index, ...)
            shard = array[index]
            if self.parts is not None:
                shard = self.parts.lay(shard)
            for number, device in enumerate(group.devices):
                yield device, shard if self.parts is None else self.parts.cut(shard, number)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the shards on all local devices together."""
        shard: Shape = self.sharding.shard_shape(self.shape)
        return math.prod(shard) * self.dtype.itemsize * sum(len(group.devices) for group in self.groups)


def local_devices_of(sharding: Any) -> tuple[Device, ...]:
    """Return the devices of a sharding that are this process's, in a fixed order."""
    return tuple(sorted(sharding.addressable_devices, key=lambda device: device.id))


def plan_leaf(sharding: Any, local_shape: Shape, dtype: np.dtype[Any]) -> LeafPlan:
    """Plan a leaf. This process has the data of its own devices, which is all of it if there are no others.

    Raises `ValueError` where the sharding cannot divide it.
    """
    return _planned(sharding, _global_shape(sharding, local_shape), dtype, whole=False)


def plan_whole_leaf(sharding: Any, shape: Shape, dtype: np.dtype[Any]) -> LeafPlan:
    """Plan a leaf of which every process has the whole, and reads what its own devices need. Raises as `plan_leaf`."""
    return _planned(sharding, shape, dtype, whole=True)


def _planned(sharding: Any, shape: Shape, dtype: np.dtype[Any], *, whole: bool) -> LeafPlan:
    shard = _shard_shape(sharding, shape)
    groups = _groups(sharding, shape, shard, whole=whole)
    sizes = {len(group.devices) for group in groups}
    parts = _parts(shard, dtype.itemsize, sizes.pop()) if len(sizes) == 1 else None
    return LeafPlan(shape, sharding, dtype, groups, parts)


def _shard_shape(sharding: Any, shape: Shape) -> Shape:
    spec = getattr(sharding, "spec", ())
    if len(spec) > len(shape):
        raise ValueError(
            f"shape {shape} has {len(shape)} axes, and {spec} names {len(spec)}. Give a tree of shardings, with one for each array"
        )
    try:
        return tuple(sharding.shard_shape(shape))
    except ValueError as error:
        raise ValueError(
            f"shape {shape} cannot be divided by {getattr(sharding, 'spec', sharding)} over {sharding.num_devices} devices. "
            f"Pad the batch, drop it if it is the last one and smaller, or choose a size that can be divided ({error})"
        ) from error


def _groups(sharding: Any, shape: Shape, shard: Shape, *, whole: bool) -> tuple[Group, ...]:
    where = {
        device: tuple(part.indices(length)[0] for part, length in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    # Shards lie side by side in the host's array in the order of their places in the global one.
    starts = [sorted(set(column)) for column in zip(*where.values(), strict=True)]
    members: dict[tuple[int, ...], list[Device]] = defaultdict(list)
    for device in local_devices_of(sharding):
        members[where[device]].append(device)
    groups = []
    for place, devices in sorted(members.items(), key=lambda item: item[0]):
        begins = place if whole else tuple(starts[axis].index(start) * shard[axis] for axis, start in enumerate(place))
        # To leave axes out makes a view in a fraction of the time.
        split = [axis for axis, length in enumerate(shard) if length != (shape[axis] if whole else len(starts[axis]) * length)]
        index = tuple(slice(begins[axis], begins[axis] + shard[axis]) for axis in range(max(split, default=-1) + 1))
        groups.append(Group(index, tuple(devices)))
    return tuple(groups)


def _parts(shard: Shape, itemsize: int, replicas: int) -> Parts | None:
    count = math.prod(shard)
    if replicas == 1 or count * itemsize < WORTH_SPLITTING or count < replicas * replicas:
        return None
    if shard[0] % replicas == 0:
        return Parts(shard, True, shard[0] // replicas, 0)
    step = -(-count // replicas)
    return Parts(shard, False, step, step * replicas - count)


def _global_shape(sharding: Any, local_shape: Shape) -> Shape:
    """Return the shape of the global array, as `jax.make_array_from_process_local_data` finds it."""
    if sharding.is_fully_addressable or sharding.is_fully_replicated:
        return local_shape
    # A shape that every sharding over so many devices divides.
    places = sharding.devices_indices_map((sharding.num_devices,) * len(local_shape))
    return tuple(length * _processes_along(places, axis) for axis, length in enumerate(local_shape))


def _processes_along(places: Any, axis: int) -> int:
    """Return how many processes have their data side by side along an axis."""
    of_process: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for device, index in places.items():
        of_process[device.process_index].add((index[axis].start, index[axis].stop))
    distinct = {frozenset(pieces) for pieces in of_process.values()}
    together = frozenset[tuple[int, int]]().union(*distinct)
    if len({len(pieces) for pieces in distinct}) > 1 or sum(map(len, distinct)) != len(together):
        raise ValueError(
            f"along axis {axis} the processes need parts of the array that overlap, or that differ in number, so its size cannot "
            "be told from the data of one. Order the devices of the mesh by process, as jax.make_mesh does"
        )
    return len(distinct)
