"""Prefetching for programs on many devices: it gives global arrays, and each shard goes straight to its device.

The loop itself, its thread and its reports are those of `xferlib.Prefetch`.
"""

from __future__ import annotations

import atexit
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from operator import call
from types import TracebackType
from typing import Any, Generic, TypeAlias, final, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xferlib
from xferlib.tickets import Alive
from xferlib.typed import KeyT, NamedT, TreeT, TreeT_co, Unnamed
from xferlib.uninterrupted import collects
from xferlib_jax._arrays import FINALIZERS, NO_FINALIZERS
from xferlib_jax._sharded import ShardedPuts
from xferlib_jax._spread import local_devices_of
from xferlib_jax._stagers import Device, Hold, given, hold
from xferlib_jax._trees import with_records

__all__ = ["ShardedPrefetch", "check_platform", "checked_devices", "prefetch", "prefetch_to_device", "refuse_finalizers"]

Stagers: TypeAlias = Sequence[xferlib.Stager] | None


@overload
def prefetch(
    batches: Iterable[xferlib.Slot[TreeT]], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[TreeT]: ...
@overload
def prefetch(
    batches: Iterable[NamedT], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[NamedT]: ...
@overload
def prefetch(
    batches: Iterable[dict[KeyT, Any]], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[dict[KeyT, Any]]: ...
@overload
def prefetch(
    batches: Iterable[Unnamed], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[Any]: ...
@overload
def prefetch(
    batches: Iterable[TreeT], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[TreeT]: ...
def prefetch(
    batches: Iterable[Any], sharding: Any, depth: int = 2, *, stagers: Stagers = None, rewrites: bool | None = None
) -> ShardedPrefetch[Any]:
    """Iterate batches as global JAX arrays; up to `depth` are being copied, or are there, while the consumer works.

    `batches`: any iterable of trees of NumPy arrays, as JAX sees trees (and dataclasses besides), or of slots of a `xferlib.Ring`.
    With several processes, each gives the data of its own devices, as for `jax.make_array_from_process_local_data`. `sharding`: one
    for all arrays, or a tree of them that is a prefix of the batches'. It may include devices of other processes.

    Data that several devices of this process need crosses the bus once: each device pulls a part, and the parts are gathered over
    the links between the GPUs, by a computation that `next` launches. So call `next` on the thread that launches the other
    computations. Arrays of less than 128 KiB a shard are sent to each device.

    `stagers`: the caller's own, one for each device, as `local_stagers` opens them. Without it the process's shared stagers are
    used. They are opened for the first loop and kept, with their memory, for later ones, until `xferlib_jax.close()` or the end of
    the process. Contiguous pinned memory is read where it is, whichever of the stagers pinned it. `rewrites` and the type of the
    batches are as for `xferlib.prefetch`.

    Raises `TypeError` and `ValueError`, and what `xferlib.stager` raises.
    """
    if isinstance(batches, jax.sharding.Sharding | jax.Device):
        raise TypeError(f"batches is {batches!r}: expected an iterable of batches. The sharding comes second")
    refuse_finalizers()
    devices = _devices_of(sharding)
    held = hold(devices, keep=True) if stagers is None else given(stagers, devices)
    if rewrites is None:
        rewrites = getattr(batches, "rewrites", True)
    return ShardedPrefetch(batches, sharding, held, depth=depth, rewrites=rewrites)


def prefetch_to_device(
    iterator: Iterable[Any], size: int = 2, devices: Sequence[Device] | None = None, axis_name: str = "_device_put_sharded"
) -> ShardedPrefetch[Any]:
    """Do as `flax.jax_utils.prefetch_to_device`: split the first axis of each array over the devices, for `jax.pmap`.

    `iterator`: trees of NumPy arrays with as many rows as there are devices. `devices`: local ones, all of them unless given.
    """
    chosen = jax.local_devices() if devices is None else list(devices)
    return prefetch(iterator, NamedSharding(Mesh(np.array(chosen), (axis_name,)), PartitionSpec(axis_name)), size)


@final
class ShardedPrefetch(Generic[TreeT_co]):
    """Gives global arrays that are put ahead of time, on a thread, for one pass. Made by `prefetch`.

    It is like a `xferlib.Prefetch`, over several stagers: it goes on behind an error, ends, and refuses a second pass as that does.
    When it ends, it lets go of the stagers, which stay open for the next loop.
    """

    def __init__(
        self, batches: Iterable[Any], sharding: Any, held: Hold | None = None, *, depth: int = 2, rewrites: bool = True
    ) -> None:
        if held is None:
            raise TypeError("a ShardedPrefetch is what prefetch returns: call xferlib_jax.prefetch(batches, sharding)")
        self._hold = held
        try:
            self._puts = puts = ShardedPuts(sharding, held, rewrites=rewrites)
            self._loop: xferlib.Prefetch[TreeT_co] = xferlib.Prefetch(batches, puts, depth)
        except BaseException:
            held.release()
            raise
        _live.add(self)

    @property
    def stagers(self) -> tuple[xferlib.Stager, ...]:
        """The stagers, in the order of their devices' numbers."""
        return tuple(self._hold.stagers.values())

    @property
    def bill(self) -> xferlib.MemoryEstimate:
        """The memory that the loop needs, on all local devices together. Waits for the source's first batch."""
        bill, nbytes = self._loop.bill, self._puts.first_nbytes
        if nbytes is None:
            return bill
        devices = len(self._hold.stagers)
        what = "batches" if devices == 1 else f"batches over {devices} devices"
        charges = tuple(
            replace(charge, nbytes=nbytes, what=what) if charge.memory == "device" else charge for charge in bill.charges
        )
        return replace(bill, charges=charges)

    def report(self) -> xferlib.Report:
        """See `xferlib.Prefetch.report`."""
        return self._loop.report()

    def close(self) -> None:
        """End the loop: nothing is in flight and no thread is left. Twice is fine; any thread."""
        self._loop.close()
        self._puts.end()
        self._hold.release()

    def __len__(self) -> int:
        """See `xferlib.Prefetch`."""
        return len(self._loop)

    def __bool__(self) -> bool:
        """Say yes, whatever the length, as other iterators do."""
        return True

    def __iter__(self) -> Iterator[TreeT_co]:
        """Begin the pass, or go on with it. Raises `ClosedError` where there is nothing to go on with."""
        iter(self._loop)
        # Neither the inner loop's iterator, which would not end this one, nor itself: see `xferlib.Prefetch`.
        return map(call, repeat(self.__next__))

    def __next__(self) -> TreeT_co:
        refuse_finalizers()
        try:
            return next(self._loop)
        except StopIteration:
            self.close()
            raise
        except Exception:
            # The batch of this error is the only one lost.
            raise
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardedPrefetch[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def refuse_finalizers() -> None:
    """Raise `CapabilityError` in a finalizer that the collector runs, where JAX may not be called."""
    if not FINALIZERS and collects():
        raise xferlib.CapabilityError(f"backend 'jax' {NO_FINALIZERS}")


def _devices_of(sharding: Any) -> tuple[Device, ...]:
    """Return the local devices of all shardings of a tree. Raises `TypeError` and `ValueError`."""
    shardings = jax.tree.leaves(with_records(sharding))
    if not shardings:
        raise ValueError(f"there is no sharding in {sharding!r}. Give one for all arrays, or a tree with one for each")
    devices: dict[Device, None] = {}
    for found in shardings:
        devices |= dict.fromkeys(checked_devices(found))
    return tuple(sorted(devices, key=lambda device: device.id))


def checked_devices(sharding: Any) -> tuple[Device, ...]:
    """Return the local devices of a sharding that arrays can be put over. Raises `TypeError` and `ValueError`."""
    if not isinstance(sharding, jax.sharding.Sharding):
        advice = "Make one: jax.sharding.NamedSharding(mesh, PartitionSpec(...))"
        if isinstance(sharding, xferlib.Stager):
            advice = "For one stager call xferlib.prefetch(batches, stager); for several, give these as stagers= beside a sharding"
        elif isinstance(sharding, jax.Device):
            advice = "For one device make jax.sharding.SingleDeviceSharding(device)"
        raise TypeError(f"expected a sharding, got {reprlib.repr(sharding)}. {advice}")
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise ValueError(f"{sharding} has a mesh without devices. Make one with jax.make_mesh or jax.sharding.Mesh")
    devices = local_devices_of(sharding)
    if not devices:
        raise ValueError(
            f"none of the devices of {sharding} is process {jax.process_index()}'s. Prefetch in those processes whose devices "
            "they are"
        )
    local = jax.local_devices()
    for device in devices:
        check_platform(device, local)
        kind = sharding.memory_kind
        if kind not in (None, device.default_memory().kind):
            raise ValueError(f"{sharding} is in memory of kind {kind!r}, and batches go to device memory. Leave memory_kind out")
    return devices


def check_platform(device: Device, local: Sequence[Device]) -> None:
    """Raise `ValueError` unless this is one of the local devices that JAX computes on by default."""
    if device not in local:
        raise ValueError(
            f"the sharding is over {device} of platform {device.platform!r}, and JAX computes on {local[0].platform!r} here. "
            f"Make the mesh of jax.devices(), or set JAX_PLATFORMS={device.platform}"
        )


def _close_all() -> None:
    """At interpreter exit, before the stagers are closed as forgotten."""
    for loop in _live:
        loop.close()


_live: Alive[ShardedPrefetch[Any]] = Alive()
atexit.register(_close_all)
