"""Batches that several devices share: each device pulls its part on its own stager, and global arrays are made of the parts.

Invariants: a whole batch is checked before any part of it starts; if a batch fails, what was started of it is done before the error
is raised; computations are launched only by the thread that takes the batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Literal, TypeAlias, final

import jax
import numpy as np

import xferlib
from xferlib.errors import ClosedError, XferError
from xferlib.latch import Latch
from xferlib.tree import rides_along
from xferlib.uninterrupted import uninterrupted
from xferlib_jax import _arrays
from xferlib_jax._gather import gathers
from xferlib_jax._globals import GlobalArrays
from xferlib_jax._spread import Array, LeafPlan, plan_leaf
from xferlib_jax._stagers import Device, Hold, at_once
from xferlib_jax._trees import with_records, without_records

__all__ = ["BatchPlan", "ShardedPuts", "ShardedTransfer", "start", "start_at_once", "wait_for_all"]

KEPT_PLANS = 16
NUMPY = {np.ndarray}
NO_RIDERS: frozenset[int] = frozenset()

Plans: TypeAlias = "OrderedDict[tuple[Any, ...], BatchPlan]"


@final
class BatchPlan:
    """Where the leaves of batches of one structure go, and how they become whole."""

    def __init__(self, tree: Any, leaves: Sequence[LeafPlan], *, has_records: bool) -> None:
        self.leaves = leaves
        self._devices = [[device for group in leaf.groups for device in group.devices] for leaf in leaves]
        self._globals = [GlobalArrays(leaf.shape, leaf.sharding) for leaf in leaves]
        self._moves = True
        """Whether what a device pulled may be on another one."""
        self._tree = tree
        self._has_records = has_records
        self._gathers = gathers(leaves)

    @property
    def device_nbytes(self) -> int:
        """The bytes of one batch on all local devices together."""
        return sum(leaf.device_nbytes for leaf in self.leaves)

    def views(self, arrays: Sequence[Array]) -> dict[Device, list[Array]]:
        """Return what each device pulls, leaf by leaf."""
        found: dict[Device, list[Array]] = {}
        for leaf, array in zip(self.leaves, arrays, strict=True):
            for device, view in leaf.views(array):
                found.setdefault(device, []).append(view)
        return found

    def whole(self, pulled: dict[Device, Iterator[Any]], riders: dict[int, Any]) -> Any:
        """Return the batch of global arrays, from what each device pulled. `riders`: leaves that stay where they are, by number."""
        pieces: list[Any] = [{device: next(pulled[device]) for device in devices} for devices in self._devices]
        if self._moves:
            self._moves = _move(pieces)
        for numbers, gather in self._gathers:
            for number, shards in zip(numbers, gather([pieces[number] for number in numbers]), strict=True):
                pieces[number] = shards
        made = [make(shards) for make, shards in zip(self._globals, pieces, strict=True)]
        if riders:
            arrays = iter(made)
            made = [riders[number] if number in riders else next(arrays) for number in range(self._tree.num_leaves)]
        whole = self._tree.unflatten(made)
        return without_records(whole) if self._has_records else whole


@final
class ShardedTransfer:
    """The transfers of one batch, one for each device. See `xferlib.pipeline.completion.Completion`.

    Once `value` was taken, a thread that waits for the transfer holds no arrays. The slot that it reads goes back to its ring when
    `done` or `synchronize` has found the transfer done.
    """

    def __init__(
        self, plan: BatchPlan, transfers: dict[Device, xferlib.Transfer], riders: dict[int, Any], slot: xferlib.Slot | None
    ) -> None:
        self._plan = plan
        self._riders = riders
        self._transfers: dict[Device, xferlib.Transfer] | None = transfers
        # Without the arrays: otherwise their memory could not be used again as long as somebody might want to wait.
        self._completions = [transfer.completion for transfer in transfers.values()]
        self._slot = slot

    @property
    def value(self) -> Any:
        """The batch, to be taken once. The host waits where JAX computes on the CPU; with GPUs it waits for nothing."""
        transfers, self._transfers = self._transfers, None
        assert transfers is not None, "the value was taken"
        return self._plan.whole({device: iter(transfer.value) for device, transfer in transfers.items()}, self._riders)

    def done(self) -> bool:
        """See `Transfer.done`."""
        if not all(completion.done() for completion in self._completions):
            return False
        self._let_slot_go()
        return True

    def synchronize(self) -> None:
        """See `Transfer.synchronize`."""
        wait_for_all(self._completions)
        self._let_slot_go()
        for completion in self._completions:
            completion.synchronize()

    def wait_staged(self) -> None:
        """See `Transfer.wait_staged`."""
        for completion in self._completions:
            completion.wait_staged()

    def _let_slot_go(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


@final
class ShardedPuts:
    """Puts batches over several stagers, for a `xferlib.Prefetch`. One thread at a time starts them."""

    def __init__(self, sharding: Any, hold: Hold, *, rewrites: bool) -> None:
        self.first_nbytes: int | None = None
        """What the first batch takes on all local devices together."""
        self.rewrites = rewrites
        self._sharding = with_records(sharding)
        # Held as long as somebody may put, even if that is only a thread whose loop was dropped.
        self._hold = hold
        self._stagers = hold.stagers
        backends = [stager.backend for stager in hold.stagers.values()]
        # GPUs have the driver in common, which knows what is pinned, whoever pinned it.
        self._pinners = backends[:1] if backends[0].on_gpu else backends
        self._depth = 0
        self._plans: Plans = OrderedDict()
        # Reentrant: a finalizer that ends the loop may run inside a put of its own thread.
        self._putting = threading.RLock()
        self._over = False

    def put(self, batch: Any, *, unshared: bool) -> ShardedTransfer:
        """Start the copies of a batch: a tree of arrays, or a slot of any ring. Raises as `Stager.put`.

        `unshared`: nobody else can write to it.
        """
        with self._putting:
            if self._over:
                raise ClosedError("this loop has ended")
            return self._put(batch, borrow="staged" if self.rewrites and not unshared else True)

    def end(self) -> None:
        """Refuse to start anything from now on. Waits for a batch that is being started."""
        with self._putting:
            self._over = True

    def _put(self, batch: Any, *, borrow: bool | Literal["staged"]) -> ShardedTransfer:
        slot = batch if isinstance(batch, xferlib.Slot) else None
        given = batch if slot is None else slot.tree
        leaves, tree = jax.tree.flatten(given)
        arrays, riders, has_records = leaves, {}, False
        if set(map(type, leaves)) != NUMPY:
            recorded = with_records(given)
            has_records = recorded is not given
            leaves, tree = jax.tree.flatten(recorded)
            riders = {number: leaf for number, leaf in enumerate(leaves) if rides_along(type(leaf))}
            arrays = [_checked(leaf, tree, number) for number, leaf in enumerate(leaves) if number not in riders]
        if slot is not None and slot.rows is not None:
            arrays = [array[: slot.rows] for array in arrays]
        plan = self._plan(tree, arrays, frozenset(riders) if riders else NO_RIDERS, has_records=has_records)
        if self.first_nbytes is None:
            self.first_nbytes = plan.device_nbytes
        transfers = start(self._stagers, plan.views(arrays), borrow=borrow)
        return ShardedTransfer(plan, transfers, riders, slot)

    def in_place(self, batch: Any) -> bool:
        """Tell whether a copy still reads memory that the source may rewrite after `put` of a batch has returned."""
        if isinstance(batch, xferlib.Slot):
            # Slots are found to be free when later batches are started. With so few slots that would be too late.
            return batch.ring.slots <= self._depth
        if not self.rewrites:
            return False
        return any(self._is_pinned(leaf) for leaf in jax.tree.leaves(with_records(batch)))

    def nbytes(self, batch: Any) -> int:
        """Return the bytes of a batch's arrays. What is no array counts for nothing."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(with_records(batch)) if isinstance(leaf, np.ndarray | np.generic))

    def check_room(self, batch: Any, depth: int, count: int) -> None:
        """Note how far the loop is ahead. Each stager has a limit of its own, and refuses by itself."""
        self._depth = depth

    def take(self, started: ShardedTransfer) -> Any:
        """Return the global arrays of a batch. On the consumer's thread: it may launch a gather."""
        return started.value

    def device_waits(self) -> int:
        """Return how many puts of all stagers have waited on their device."""
        return sum(stager.stats().device_waits for stager in self._stagers.values())

    def _is_pinned(self, leaf: Any) -> bool:
        if not isinstance(leaf, np.ndarray) or not leaf.nbytes:
            return False
        address = leaf.__array_interface__["data"][0]
        return any(backend.is_pinned(address, leaf.nbytes) for backend in self._pinners)

    def _plan(self, tree: Any, arrays: Sequence[Array], riders: frozenset[int], *, has_records: bool) -> BatchPlan:
        """`riders`: the numbers of leaves that are no arrays, and stay where they are."""
        key = (tree, riders, *((array.shape, array.dtype) for array in arrays))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = BatchPlan(tree, self._plan_leaves(tree, arrays, riders), has_records=has_records)
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _plan_leaves(self, tree: Any, arrays: Sequence[Array], riders: frozenset[int]) -> list[LeafPlan]:
        if not arrays:
            raise ValueError(
                "there is no array in the batch: expected a NumPy array, or a tree of them. Leave empty batches out, and convert "
                "numbers with numpy.asarray"
            )
        numbers = [number for number in range(tree.num_leaves) if number not in riders]
        numbered = tree.unflatten(None if number in riders else number for number in range(tree.num_leaves))
        try:
            shardings = jax.tree.leaves(jax.tree.broadcast(self._sharding, numbered))
        except ValueError as error:
            raise ValueError(
                f"sharding has another structure than the batch: expected {tree}, got {jax.tree.structure(self._sharding)}. Give "
                "one sharding for all arrays, or a tree with one for each"
            ) from error
        leaves = []
        for number, array, sharding in zip(numbers, arrays, shardings, strict=True):
            try:
                _arrays.check_dtype(array.dtype)
                leaves.append(plan_leaf(sharding, array.shape, array.dtype))
            except (TypeError, ValueError) as error:
                error.add_note(f"at {_path(tree, number)}")
                raise
        return leaves


def start(
    stagers: Mapping[Device, xferlib.Stager], views: Mapping[Device, list[Array]], *, borrow: bool | Literal["staged"]
) -> dict[Device, xferlib.Transfer]:
    """Start copying to each device what it pulls. If one cannot be started, those before it are done before that is raised.

    An interrupt may come between the start of a transfer and its entry: a load then waits for all that was put.
    """
    transfers: dict[Device, xferlib.Transfer] = {}
    try:
        for device, arrays in views.items():
            transfers[device] = stagers[device].put(arrays, borrow=borrow)
    except BaseException:
        wait_for_all(transfers.values())
        raise
    return transfers


def start_at_once(
    stagers: Mapping[Device, xferlib.Stager], views: Mapping[Device, list[Array]], threads: Executor
) -> dict[Device, xferlib.Transfer]:
    """Start as `start` does, and borrow, with a thread for each device: the first put of a stager takes memory of the driver's, and
    all of them memory of JAX's, for which no device is to wait until another one has its own."""
    transfers: dict[Device, xferlib.Transfer] = {}
    ended = Latch()
    owner: dict[None, str] = {}
    # JAX keeps it for each thread.
    wide = jax.config.jax_enable_x64

    def put(device: Device) -> None:
        with jax.enable_x64(wide):
            transfers[device] = stagers[device].put(views[device], borrow=True)

    def put_all() -> None:
        try:
            if owner.setdefault(None, "started") == "started":
                at_once(threads, put, views)
        finally:
            ended.open()

    try:
        # No interrupt comes to those threads, and none between a transfer and its entry.
        uninterrupted(put_all)
    except BaseException:
        # Whoever interrupts the wait for it waits all the same, unless it has not begun.
        if owner.setdefault(None, "given up") == "started":
            ended.wait()
        wait_for_all(transfers.values())
        raise
    return transfers


def _checked(leaf: Any, tree: Any, number: int) -> Array:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            f"{_path(tree, number)} is a {_arrays.kind_of(leaf)}: it stands for an array inside a function that JAX traces, and "
            "has no memory. Make batches outside of jit, grad and vmap"
        )
    if isinstance(leaf, jax.Array):
        raise TypeError(
            f"{_path(tree, number)} is a jax.Array, which is on its devices already. Make batches of NumPy arrays, or spread it "
            "with jax.device_put(array, sharding)"
        )
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if not isinstance(leaf, np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{_path(tree, number)} is a {_arrays.kind_of(leaf)}: expected a plain NumPy array. Convert it with numpy.asarray, "
            "fill what is masked, or leave it on the host: xferlib.Host(...)"
        )
    return np.asarray(leaf)


def _path(tree: Any, number: int) -> str:
    where, _ = jax.tree.leaves_with_path(tree.unflatten(range(tree.num_leaves)))[number]
    return f"batch{jax.tree_util.keystr(where)}"


def _move(pieces: Iterable[dict[Device, Any]]) -> bool:
    """Have each array on its device, and tell whether one was not: without its private import, JAX imports memory of the host to
    its first CPU device alone."""
    moved = False
    for shards in pieces:
        for device, array in shards.items():
            if array.device != device:
                shards[device] = jax.device_put(array, device)
                moved = True
    return moved


def wait_for_all(transfers: Iterable[Any]) -> None:
    """Block until all are over, whether they failed or not."""
    for transfer in transfers:
        # The thread that takes the batch is told.
        with suppress(XferError):
            transfer.synchronize()
