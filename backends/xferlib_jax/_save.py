"""Arrays of several devices to files: which shard is read from which device.

How a file is written is `xferlib.save`'s matter; this says of which shards its arrays are made.
"""

from __future__ import annotations

import math
import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Never, TypeAlias, final

import jax

import xferlib
from xferlib.tree import trees_of
from xferlib_jax import _arrays
from xferlib_jax._cpu import CpuStager
from xferlib_jax._prefetch import check_platform, refuse_finalizers
from xferlib_jax._stagers import Device, Hold, given, hold

__all__ = ["save"]

Stagers: TypeAlias = Sequence[xferlib.Stager] | None
Start: TypeAlias = tuple[int, ...]
SAVE_MEMORY = 256 << 20
"""Bytes, as for `xferlib.save`."""


def save(
    path: Any,
    tree: Any,
    *others: Never,
    metadata: Mapping[str, str] | None = None,
    memory: int = SAVE_MEMORY,
    rate_limit: float | None = None,
    keep: int | None = None,
    snapshot: bool = False,
    stagers: Stagers = None,
) -> xferlib.Save:
    """Start writing a tree of JAX arrays to one file, wherever their shards are, and return at once: as `xferlib.save`, which says
    all about the file and the arguments.

    The file has whole arrays, and nothing of how they were divided: `xferlib_jax.load` puts them over any sharding, and
    `xferlib.load` onto one device. Each shard is read from its own device, and each byte once: what several devices have is read
    from one of them, so that all have about as much to do. What is not divided by rows is put together on the host, in as much
    pageable memory as the save has pinned.

    - `memory`: for all devices together.
    - `snapshot`: each device copies what is read from it. Where one has no room for that, `Save.held_nbytes` is not 0.
    - `stagers`: the caller's own, one for each device; to close one waits until all is read there. Without it the process's shared
      stagers are used, as `prefetch` says. In handlers of `atexit` from Python 3.12 on none can be opened any more: register a
      handler that saves behind the first save or loop, whose stagers it finds open then, or give it yours.

    Under `jax.distributed` a process that saves needs every part of each array on devices of its own.

    Raises as `xferlib.save`, `ValueError` for arrays of which this process has not every part, and as `xferlib.stager`.
    """
    if others:
        raise _refused(others)
    refuse_finalizers()
    devices = _devices_of(tree)
    held = hold(devices, keep=True) if stagers is None else given(stagers, devices)
    arrays = _Arrays(held)
    return xferlib.save(path, tree, arrays, metadata=metadata, memory=memory, rate_limit=rate_limit, keep=keep, snapshot=snapshot)


def _refused(others: Sequence[object]) -> TypeError:
    """Return the error for arguments behind the tree: `xferlib.save` takes its stager there."""
    if isinstance(others[0], xferlib.Stager):
        advice = "It finds the devices, and stagers for them, by itself: leave this one out, or pass stagers=[stager]"
    else:
        advice = "Pass what comes behind the tree by its name"
    return TypeError(f"xferlib_jax.save(path, tree) takes no third argument, got {reprlib.repr(others[0])}. {advice}")


def _devices_of(tree: Any) -> list[Device]:
    """Return the local devices that have a part of the tree; where it has no arrays, one that will say so."""
    found: dict[Device, None] = {}
    # Of its class: it is asked only for its trees, which are those of every stager of JAX.
    trees = trees_of(CpuStager)  # type: ignore[arg-type]
    for leaf in trees.arrays(tree)[0]:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            found |= dict.fromkeys(leaf.sharding.addressable_devices)
    local = jax.local_devices()
    return sorted(set(found) & set(local), key=lambda device: device.id) or local[:1]


@final
class _Arrays:
    """See `xferlib.files.sharded.ShardedArrays`."""

    def __init__(self, held: Hold) -> None:
        self._held = held
        self._local = jax.local_devices()
        self.stagers = list(held.stagers.values())
        self.backend = self.stagers[0].backend
        self._known: dict[tuple[Any, Start], list[tuple[Start, list[Device]]]] = {}
        """Where the shards are, by sharding and shape: layers are alike."""
        self._nbytes: dict[Device, int] = defaultdict(int)
        """What is read from each device."""

    def shards(self, array: Any) -> list[tuple[xferlib.Stager, Any, Start]]:
        _arrays.check_class(array)
        _arrays.check_dtype(array.dtype)
        key = array.sharding, array.shape
        if key not in self._known:
            self._known[key] = self._places(*key)
        on_device = _arrays.shards_of(array)
        found = []
        for start, devices in self._known[key]:
            device = min(devices, key=self._nbytes.__getitem__)
            shard = on_device[device]
            self._nbytes[device] += _arrays.nbytes_of(shard)
            found.append((self._held.stagers[device], shard, start))
        return found

    def release(self) -> None:
        self._held.release()

    def _places(self, sharding: Any, shape: Start) -> list[tuple[Start, list[Device]]]:
        """Return where each shard begins, and which devices have it."""
        kind = sharding.memory_kind
        places: dict[Start, list[Device]] = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            check_platform(device, self._local)
            if self.backend.on_gpu and kind not in (None, device.default_memory().kind):
                raise ValueError(f"the array is in host memory ({kind}) already. Look at it with numpy.asarray(array)")
            places[tuple(part.indices(length)[0] for part, length in zip(index, shape, strict=True))].append(device)
        if not places or len(places) * math.prod(sharding.shard_shape(shape)) < math.prod(shape):
            raise ValueError(
                f"parts of the array are on devices of other processes, and process {jax.process_index()} cannot read them. Let "
                "all processes gather it, array = jax.experimental.multihost_utils.process_allgather(array, tiled=True), which "
                "gives each a NumPy array, or spread it over the devices of one process by jax.device_put, and save it there"
            )
        return list(places.copy().items())
