"""Files to several devices: each process reads what its devices need, and each device pulls its part of it.

The files are `xferlib.load`'s: this says where their arrays go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, final, overload

import jax

import xferlib
from xferlib.typed import TreeT
from xferlib.uninterrupted import uninterrupted
from xferlib_jax._prefetch import checked_devices
from xferlib_jax._sharded import BatchPlan, start, start_at_once, wait_for_all
from xferlib_jax._spread import Array, plan_whole_leaf
from xferlib_jax._stagers import Device, Hold, given, hold
from xferlib_jax._trees import with_records

__all__ = ["load"]

Stagers: TypeAlias = Sequence[xferlib.Stager] | None
LEAF = jax.tree.structure(0)
Key: TypeAlias = tuple[tuple[int, ...], Any, Any]
"""Shape, dtype and sharding."""


@overload
def load(
    path: Any, sharding: Any = None, *, like: TreeT, dtype: Any = None, progress: Any = None, stagers: Any = None
) -> TreeT: ...
@overload
def load(
    path: Any,
    sharding: Any = None,
    *,
    names: None = None,
    like: None = None,
    dtype: Any = None,
    progress: Any = None,
    stagers: Stagers = None,
) -> Any: ...
@overload
def load(
    path: Any,
    sharding: Any = None,
    *,
    names: Iterable[str],
    like: None = None,
    dtype: Any = None,
    progress: Any = None,
    stagers: Stagers = None,
) -> dict[str, Any]: ...
def load(
    path: Any,
    sharding: Any = None,
    *,
    names: Iterable[str] | None = None,
    like: Any = None,
    dtype: Any = None,
    progress: Any = None,
    stagers: Stagers = None,
) -> Any:
    """Put what files hold over several devices, wait until it is there, and return it as global arrays.

    `sharding`: one for all arrays, or a dict of them by patterns of names (`"*.kernel"`), of which the first that fits counts. A
    pattern without effect is refused: one that no name in the files has, or that stands behind a wider one. An array that it says
    nothing of goes where that of `like` is, or is to be: a `jax.ShapeDtypeStruct` may have a sharding.

    Every byte is read once, and a process reads what its own devices need; under `jax.distributed` all processes see the files, and
    all of them load. What several devices of a process need crosses the bus once, as `prefetch` says, which needs a compilation for
    each shape that is replicated. Parts that are no rows are copied by one thread for each device.

    `stagers` as for `prefetch`, all else as for `xferlib.load`: `.npy` gives an array. Raises as these do, and `ValueError` for an
    array that has no sharding, or one that cannot divide it, and for a pattern without effect.
    """
    rules = _rules(sharding)
    devices: dict[Device, None] = {}
    for rule in rules.values():
        devices |= dict.fromkeys(checked_devices(rule))
    for leaf in jax.tree.leaves(with_records(like)):
        own = getattr(leaf, "sharding", None)
        if own is not None:
            devices |= dict.fromkeys(checked_devices(own))
    if not devices:
        raise ValueError(
            "there is no sharding: give one as sharding=, or one with each array of like. For one device, use xferlib.load"
        )
    ordered = sorted(devices, key=lambda device: device.id)
    held = hold(ordered, keep=False) if stagers is None else given(stagers, ordered)
    threads = ThreadPoolExecutor(len(ordered), "xferlib-jax-load")
    try:
        puts = _Puts(held, rules, list(rules) if isinstance(sharding, Mapping) else [], threads)
        return xferlib.load(path, puts, names=names, like=like, dtype=dtype, progress=progress)
    finally:
        # If an interrupt comes before this, they end when nobody refers to them.
        uninterrupted(threads.shutdown)
        held.release()


def _rules(sharding: Any) -> dict[str, Any]:
    if sharding is None:
        return {}
    return dict(sharding) if isinstance(sharding, Mapping) else {"*": sharding}


@final
class _Puts:
    """See `xferlib.files.load.Puts`."""

    def __init__(self, held: Hold, rules: Mapping[str, Any], patterns: Sequence[str], threads: Executor) -> None:
        self._stagers = held.stagers
        self._threads = threads
        self._rules = rules
        self.backend = next(iter(held.stagers.values())).backend
        # Otherwise other processes need a part of each array.
        self.whole = jax.process_count() == 1
        self.patterns = {"sharding": patterns}
        self._plans: dict[Key, BatchPlan] = {}
        self._takes = not all(self._taken())
        """Whether the next put will take device memory, to judge by the last one: a stager that has none takes some."""

    def put(self, arrays: dict[str, Array], like: dict[str, Any]) -> _Started:
        plans = {name: self._plan(name, array, like.get(name)) for name, array in arrays.items()}
        views: dict[Device, list[Array]] = {}
        for name, plan in plans.items():
            for device, pulled in plan.views([arrays[name]]).items():
                views.setdefault(device, []).extend(pulled)
        taken = self._taken()
        # Where nobody waits for the driver, threads that wait for each other take twice the time.
        transfers = start_at_once(self._stagers, views, self._threads) if self._takes else start(self._stagers, views, borrow=True)
        self._takes = self._taken() != taken
        return _Started(plans, transfers)

    def idle(self) -> None:
        for stager in self._stagers.values():
            # The others are waited for where one is closed.
            with suppress(xferlib.XferError):
                stager.idle()

    def wait(self, arrays: list[Any]) -> None:
        jax.block_until_ready(arrays)

    def trim(self) -> None:
        for stager in self._stagers.values():
            stager.trim()

    def _taken(self) -> list[int]:
        """Return how many bytes of the device's each stager has taken."""
        return [stager.stats().device_nbytes for stager in self._stagers.values()]

    def _plan(self, name: str, array: Array, like: Any) -> BatchPlan:
        """Plan an array by itself: layers are alike, and what gathers their parts is compiled once."""
        rule = next((rule for pattern, rule in self._rules.items() if fnmatchcase(name, pattern)), None)
        sharding = getattr(like, "sharding", None) if rule is None else rule
        if sharding is None:
            raise ValueError(f"there is no sharding for {name!r}. Add a pattern that fits it to sharding=, or give it one in like")
        key = array.shape, array.dtype, sharding
        if key not in self._plans:
            try:
                self.backend.check_dtype(array.dtype)
                self._plans[key] = BatchPlan(LEAF, [plan_whole_leaf(sharding, array.shape, array.dtype)], has_records=False)
            except (TypeError, ValueError) as error:
                error.add_note(f"at {name!r}")
                raise
        return self._plans[key]


@final
class _Started:
    """See `xferlib.files.load.Started`."""

    def __init__(self, plans: dict[str, BatchPlan], transfers: dict[Device, xferlib.Transfer]) -> None:
        self._plans = plans
        self._transfers = transfers

    @property
    def value(self) -> dict[str, Any]:
        pulled: dict[Device, Iterator[Any]] = {device: iter(transfer.value) for device, transfer in self._transfers.items()}
        # Only parts of arrays: the memory is free once they are gathered.
        self._transfers = {}
        return {name: plan.whole(pulled, {}) for name, plan in self._plans.items()}

    def synchronize(self) -> None:
        wait_for_all(self._transfers.values())
        for transfer in self._transfers.values():
            transfer.synchronize()
