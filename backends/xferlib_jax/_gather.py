"""Parts of replicated shards, each on one device, made whole on all of them.

On GPUs one compiled function does this for all leaves whose devices are the same, so that the parts travel between the devices.
Where JAX computes on the CPU, its devices share one memory and one pool of threads, and collectives of several computations at once
can block that pool for ever. There the host joins the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xferlib_jax._globals import GlobalArrays
from xferlib_jax._spread import LeafPlan, Parts
from xferlib_jax._stagers import Device

__all__ = ["Gather", "gathers"]

Pieces: TypeAlias = Mapping[Device, Any]
"""Arrays of one device each, by device."""

GROUP, REPLICA = "group", "replica"


@final
class Gather:
    """Makes leaves whole. Their parts lie on the same devices, in the same groups.

    `by_collective`: whether the devices do it among themselves. Making one compiles; calls after that only launch.
    """

    def __init__(self, leaves: Sequence[LeafPlan], *, by_collective: bool) -> None:
        self._leaves = leaves
        self._groups = tuple(group.devices for group in leaves[0].groups)
        # The same for every batch: to make them anew, and to look at the parts, would take longer than the launch.
        spread = [self._aval(_parts(leaf), leaf.dtype) for leaf in leaves] if by_collective else []
        self._spread = [GlobalArrays(aval.shape, aval.sharding) for aval in spread]
        self._launch = self._compiled(spread) if by_collective else None

    def __call__(self, pieces: Sequence[Pieces]) -> list[Pieces]:
        """Return the shards, for each leaf by device. Called by the thread that launches the devices' other computations."""
        if self._launch is None:
            return [self._joined(leaf, found) for leaf, found in zip(self._leaves, pieces, strict=True)]
        wholes = self._launch(*(spread(found) for spread, found in zip(self._spread, pieces, strict=True)))
        return [{shard.device: shard.data for shard in whole.addressable_shards} for whole in wholes]

    def _aval(self, parts: Parts, dtype: np.dtype[Any]) -> Any:
        first, *rest = parts.part_shape
        spread = NamedSharding(self._mesh(), PartitionSpec((GROUP, REPLICA)))
        return jax.ShapeDtypeStruct((first * sum(map(len, self._groups)), *rest), dtype, sharding=spread)

    def _mesh(self) -> Mesh:
        devices = np.empty((len(self._groups), len(self._groups[0])), object)
        devices[:] = self._groups
        return Mesh(devices, (GROUP, REPLICA))

    def _compiled(self, spread: Sequence[Any]) -> Callable[..., Any]:
        # Launched as it is, even where its caller is being traced.
        whole = jax.shard_map(
            lambda *found: [_whole(_parts(leaf), part) for leaf, part in zip(self._leaves, found, strict=True)],
            mesh=self._mesh(),
            in_specs=PartitionSpec((GROUP, REPLICA)),
            out_specs=PartitionSpec(GROUP),
            check_vma=False,  # JAX does not infer that what was gathered is replicated.
        )
        compiled: Callable[..., Any] = jax.jit(whole).lower(*spread).compile()
        return compiled

    def _joined(self, leaf: LeafPlan, found: Pieces) -> Pieces:
        parts = _parts(leaf)
        wholes: dict[Device, Any] = {}
        for devices in self._groups:
            *first, last = (np.asarray(found[device]) for device in devices)
            whole = np.concatenate([*first, last[parts.overlap :]]).reshape(parts.shape)
            wholes |= {device: jax.device_put(whole, device) for device in devices}
        return wholes


def gathers(leaves: Sequence[LeafPlan]) -> list[tuple[list[int], Gather]]:
    """Return what makes leaves that come in parts whole, each with the numbers of its leaves."""
    alike: dict[tuple[tuple[Device, ...], ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.parts is not None:
            alike.setdefault(tuple(group.devices for group in leaf.groups), []).append(number)
    return [
        (numbers, Gather([leaves[number] for number in numbers], by_collective=groups[0][0].platform != "cpu"))
        for groups, numbers in alike.items()
    ]


def _whole(parts: Parts, part: Any) -> Any:
    found = jax.lax.all_gather(part, REPLICA, axis=0, tiled=True)
    if parts.overlap:
        before = math.prod(parts.shape) + parts.overlap - parts.step
        found = jax.numpy.concatenate([found[:before], found[before + parts.overlap :]])
    return found.reshape(parts.shape)


def _parts(leaf: LeafPlan) -> Parts:
    assert leaf.parts is not None
    return leaf.parts
