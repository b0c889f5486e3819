"""A tree whose home is pinned memory of the host, and whose groups come to the device only while they are worked on.

The order of a group's transfers is kept by the host, which waits for the one before: mostly that was over long ago, since between
two visits to a group there are the others. A group that was not stored to its end is known as such, and is not given out.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, final, overload

import numpy as np

from xferlib.checks import uncopied, whole_number
from xferlib.engine.jobs import Job
from xferlib.errors import AllocationError, BackendUnavailableError, CapabilityError, ClosedError, TransferError, XferError
from xferlib.in_flight import Entry, uses
from xferlib.latch import is_over
from xferlib.ledger import all_ledgers, wait_for_others
from xferlib.memory.arrays import Array, address_of, check_dtype, host_array
from xferlib.memory.blocks import ALIGNMENT, round_up
from xferlib.pending import Reading
from xferlib.pipeline.failed import Failed
from xferlib.protocol import DeviceRange
from xferlib.sketch import sketched
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import Mixed, ShapeDtype, Spec, Trees, path, trees_of, unflatten
from xferlib.words import in_words

__all__ = ["HostTree"]

CLOSED = "this tree is closed. What was taken out of it before is still there"


class _Group(NamedTuple):
    """A group's home: arrays that lie together in pinned memory, and their shape as a tree."""

    arrays: list[Array]
    spec: Spec
    described: list[ShapeDtype]
    memory: DeviceRange
    """All of it, as a stager of the host sees what it saves."""


@final
class HostTree:
    """Groups of arrays that live in pinned memory of the host: optimizer states and layers for which the device has no room.

    `fetch` brings groups to the device, `store` writes them back, and both return before their copies are done. `fetch_each` goes
    through groups with the next one on its way. What a group holds is what the last `store` before has written, in the order of the
    calls.

    `tree`: a mapping of names to groups, each an array or a tree of arrays and nothing else. Arrays of NumPy and of the device are
    copied. For zeros, `numpy.broadcast_to(numpy.float32(0), shape)` takes no memory of its own.
    `depth`: how many stores may be under way; `store` waits for the oldest where there are more. So the device holds the groups
    that are fetched and not dropped, and `depth` that are on their way home.

    A store that failed, or was interrupted, leaves its groups undefined: `fetch` and reading raise `XferError`, until the group is
    stored again. Other groups are as they were.

    Any thread; one at a time for each group. A context manager: the end of a `with` block raises as `synchronize` does.

    Attributes:
        names: Of the groups, in the order of `tree`.
        nbytes: Bytes of all arrays.
        depth: As it was given.
    """

    __reduce_ex__ = uncopied("Copy what its groups hold")

    def __init__(self, tree: Mapping[str, Any], stager: Stager, *, depth: int = 2) -> None:
        """Copy the tree into pinned memory, and wait for that.

        Raises `TypeError` and `ValueError` for what is no tree of groups, and for dtypes that the device's arrays cannot have;
        `AllocationError` where `pinned_limit` has no room.
        """
        check_stager(stager, tree)
        if not isinstance(tree, Mapping) or not tree or not all(isinstance(name, str) for name in tree):
            raise TypeError(
                f"tree: expected a dict of groups by name, such as {{'layer_0': {{...}}, 'layer_1': {{...}}}}, got {sketched(tree)}"
            )
        self.depth = whole_number(depth, "depth", least=1)
        self._stager = stager
        self._trees = trees_of(stager.backend)
        self._numbers = itertools.count()
        self._closed = False
        self._groups = {name: self._home(name, group) for name, group in tree.items()}
        self.names = tuple(self._groups)
        self.nbytes = sum([array.nbytes for group in self._groups.values() for array in group.arrays])
        # By number, entered before a copy begins: None until it is known that it has. Changed in single steps.
        self._stores: dict[str, dict[int, Transfer[None] | None]] = {name: {} for name in self.names}
        self._fetches: dict[str, dict[int, Transfer[None]]] = {name: {} for name in self.names}
        self._under_way: deque[Transfer[None]] = deque()

    @overload
    def fetch(self, names: str) -> Transfer[Any]: ...
    @overload
    def fetch(self, names: Iterable[str]) -> Transfer[dict[str, Any]]: ...
    def fetch(self, names: str | Iterable[str]) -> Transfer[Any]:
        """Start copying groups to the device, and return their transfer: of a group's tree for one name, else of a dict by name.

        Waits for stores of these groups that are under way. The arrays are the caller's, to overwrite or donate, once the
        transfer's `value` was asked for. Raises `KeyError` for an unknown name, `XferError` for a group that is undefined, and as
        `Stager.put`.
        """
        wanted = self._wanted(names)
        for name in wanted:
            self._settle(name)
        trees = {name: self._tree(name) for name in wanted}
        transfer: Transfer[Any] = self._stager.put(trees[names] if isinstance(names, str) else trees)
        completion, number = transfer.completion, next(self._numbers)
        for name in wanted:
            fetches = self._fetches[name]
            for earlier in [earlier for earlier, other in fetches.copy().items() if is_over(other.done, TransferError)]:
                fetches.pop(earlier, None)
            fetches[number] = completion
        return transfer

    def fetch_each(self, names: Iterable[str] | None = None, *, ahead: int = 1) -> Iterator[tuple[str, Any]]:
        """Iterate names and device arrays of groups (None: of all), each safe on the calling thread's current stream.

        `ahead`: how many more are on their way meanwhile. Store a group before you ask for the next one, which may be the same:
        then it is fetched when it is asked for, and not ahead. Raises as `fetch` and what `names` raises, in its
        place.
        """
        whole_number(ahead, "ahead", least=0)
        # One name is no iterable of names, though Python takes it for one.
        wanted = self.names if names is None else [names] if isinstance(names, str) else names
        return self._each(iter(wanted), ahead)

    def store(self, names: str | Iterable[str], tree: Any, *, stream: object | None = None) -> Transfer[None]:
        """Start copying device arrays to the home of groups: `tree` is a group's for one name, else a dict of groups by name.

        The copies wait for what produces the arrays, or for what `stream` (None: the calling thread's current one) has enqueued. Do
        not overwrite, donate or delete the arrays before the transfer that this returns is done. Waits for fetches, stores and
        saves of these groups that are under way, and for the oldest of more than `depth` stores. A thread that reads a group
        itself, by `Stager.reader`, must close that first.

        Raises before anything starts, and leaves the groups as they are: `KeyError` for an unknown name; `ValueError` for another
        structure, shape or dtype; `TypeError`, `CapabilityError` and `ClosedError` as `Stager.get`. What else is raised leaves them
        undefined.
        A copy that fails later is told to whoever wants its groups next, and by `synchronize`.
        """
        wanted = self._wanted(names)
        given = {names: tree} if isinstance(names, str) else self._given(wanted, tree)
        for name in wanted:
            self._check(name, given[name])
        for name in wanted:
            self._wait_for_others(name)
            self._wait_for_saves(name)
        number = next(self._numbers)
        for name in wanted:
            self._stores[name][number] = None
        try:
            transfer = self._stager.get(given, out={name: self._tree(name) for name in wanted}, stream=stream)
        except (TypeError, ValueError, CapabilityError, ClosedError, BackendUnavailableError):
            # Refused, and nothing is written.
            for name in wanted:
                self._stores[name].pop(number, None)
            raise
        completion = transfer.completion
        self._under_way.append(completion)
        for name in wanted:
            stores = self._stores[name]
            stores[number] = completion
            # All of it is written again, whatever had become of it.
            for earlier in [earlier for earlier in list(stores) if earlier < number]:
                stores.pop(earlier, None)
        self._wait_for_oldest()
        return completion

    def __getitem__(self, name: str) -> Any:
        """Return a group as NumPy arrays: read-only views of its home, once its stores are done.

        They change with the next `store` of the group, which waits for saves of them, but not for puts. Raises as `fetch`.
        """
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name of a group. Take several one by one, or look at `tree`")
        self._wanted(name)
        self._settle(name)
        group = self._group(name)
        return unflatten(group.spec, map(_read_only, group.arrays))

    @property
    def tree(self) -> dict[str, Any]:
        """All groups by name, as `home[name]` gives them: for a stager of the backend "host" they are arrays to save."""
        return {name: self[name] for name in self.names}

    def synchronize(self) -> None:
        """Block until no store is under way. Raises `XferError` if a group is undefined."""
        self._check_open()
        for name in self.names:
            self._settle(name)

    def close(self) -> None:
        """Wait for what is under way, and let go of the home: its memory goes back when the last array taken out of it is gone.

        Says nothing of failures. Twice is fine.
        """
        self._closed = True
        for name in self.names:
            with suppress(XferError):
                self._wait_for_others(name)
        self._groups = {}
        self._under_way.clear()

    def __enter__(self) -> HostTree:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and not self._closed:
                self.synchronize()
        finally:
            self.close()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<HostTree of {len(self.names)} groups, {in_words(self.nbytes)} on the host{state}>"

    def _home(self, name: str, tree: Any) -> _Group:
        """Copy a group into pinned memory."""
        leaves, spec = self._trees.arrays(tree)
        if not leaves or isinstance(spec, Mixed):
            found = "text or numbers beside its arrays" if leaves else "no array"
            raise ValueError(f"tree: group {name!r} has {found}. A group is an array, or a tree of arrays: keep all else yourself")
        described = [_described(self._trees, name, spec, index, leaf) for index, leaf in enumerate(leaves)]
        for index, (_, dtype) in enumerate(described):
            try:
                # Before memory is taken for what no fetch would bring to the device.
                self._stager.backend.check_dtype(dtype)
            except TypeError as error:
                error.add_note(f"at group {name!r}: {path(spec, index)}")
                raise
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
        starts = list(itertools.accumulate([round_up(nbytes, ALIGNMENT) for nbytes in sizes], initial=0))
        try:
            memory = self._stager.empty_pinned((max(1, starts[-1]),), np.uint8)
        except AllocationError as error:
            error.add_note(f"group {name!r} takes {in_words(starts[-1])}. Open the stager with a pinned_limit= for all of the tree")
            raise
        arrays = [
            memory[start : start + nbytes].view(dtype).reshape(shape)
            for start, nbytes, (shape, dtype) in zip(starts, sizes, described, strict=False)
        ]
        on_device: list[tuple[Any, Array]] = []
        for leaf, array in zip(leaves, arrays, strict=True):
            if isinstance(leaf, np.ndarray | np.generic):
                np.copyto(array, host_array(leaf))
            else:
                on_device.append((leaf, array))
        if on_device:
            self._stager.get([leaf for leaf, _ in on_device], out=[array for _, array in on_device]).synchronize()
        return _Group(arrays, spec, described, DeviceRange(address_of(memory), memory.nbytes, None))

    def _each(self, names: Iterator[str], ahead: int) -> Iterator[tuple[str, Any]]:
        coming: deque[tuple[str, Transfer[Any] | Failed]] = deque()
        # One that was looked at, and may not be fetched yet: the caller may store it before.
        waiting: list[str] = []
        while True:
            while len(coming) <= ahead:
                try:
                    waiting = waiting or list(itertools.islice(names, 1))
                except Exception as error:
                    # As with a group: those before it are sound.
                    coming.append(("", Failed(error)))
                    names = iter(())
                if not waiting or any(waiting[0] == name for name, _ in coming):
                    break
                try:
                    coming.append((waiting[0], self.fetch(waiting[0])))
                except Exception:
                    # Those before it are sound. It is asked for again behind them.
                    if not coming:
                        raise
                    break
                del waiting[0]
            if not coming:
                return
            # No name here holds the arrays while the caller has them.
            yield coming[0][0], coming.popleft()[1].value

    def _wanted(self, names: str | Iterable[str]) -> list[str]:
        self._check_open()
        if not isinstance(names, Iterable):
            raise TypeError(f"names={names!r}: expected the name of a group, or names of several")
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if not isinstance(name, str):
                raise TypeError(f"names={names!r}: {name!r} is no name of a group. Names are text")
            if name not in self._stores:
                raise KeyError(f"there is no group {name!r}: there are {', '.join(map(repr, self.names[:16]))}")
        if not wanted or len(set(wanted)) < len(wanted):
            raise ValueError(f"names={wanted!r}: expected names of groups, each once")
        return wanted

    def _given(self, wanted: Sequence[str], tree: Any) -> Mapping[str, Any]:
        if not isinstance(tree, Mapping) or set(tree) != set(wanted):
            found = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__qualname__
            raise ValueError(f"tree: expected a dict of the groups {wanted!r}, got {found!r}")
        # Of whatever class it is: the home's is a dict, and mappings of other classes are other trees, or none.
        return {name: tree[name] for name in wanted}

    def _check(self, name: str, tree: Any) -> None:
        """Raise `ValueError` or `TypeError` unless this is what the group's home has room for."""
        group = self._group(name)
        leaves = self._trees.flatten_like(group.spec, tree, name=f"group {name!r}")
        for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, group.described, strict=True)):
            got = _described(self._trees, name, group.spec, index, leaf)
            if got != (shape, dtype):
                raise ValueError(
                    f"group {name!r}: {path(group.spec, index)} is of shape {got[0]} and dtype {got[1]}, and its home is of shape "
                    f"{shape} and dtype {dtype}. Convert it, or make another HostTree"
                )

    def _group(self, name: str) -> _Group:
        """Return a group. Raises `ClosedError` where another thread has closed the tree meanwhile."""
        group = self._groups.get(name)
        if group is None:
            raise ClosedError(CLOSED)
        return group

    def _tree(self, name: str) -> Any:
        group = self._group(name)
        return unflatten(group.spec, group.arrays)

    def _settle(self, name: str) -> None:
        """Wait for the stores of a group. Raises `XferError` if its bytes are undefined."""
        # A copy, made in one call: other threads may look at the same group.
        for transfer in list(self._stores[name].values()):
            if transfer is None:
                raise XferError(
                    f"group {name!r} is undefined: a store of it was cut off before its end, or another thread is storing it. "
                    "Store it again"
                )
            try:
                transfer.synchronize()
            except TransferError as error:
                raise XferError(f"group {name!r} is undefined: its last store failed ({error}). Store it again") from error

    def _wait_for_others(self, name: str) -> None:
        """Wait until nothing reads or writes a group's home. What has failed is at rest, and all is written next."""
        for transfer in [*self._fetches[name].values(), *self._stores[name].values()]:
            if transfer is not None:
                with suppress(TransferError):
                    transfer.synchronize()

    def _wait_for_saves(self, name: str) -> None:
        """Wait until no stager of the host reads the group any more, which saves what `tree` gave.

        Raises `XferError` on a thread that is to read it itself, and so would wait for good.
        """
        home = self._group(name).memory

        def reads(work: Entry | Job | Reading) -> bool:
            return any(uses(used, home) for used in work.device_ranges)

        for ledger in all_ledgers():
            for reading in filter(reads, list(ledger.jobs.readings.values())):
                reading.wait()
        while wait_for_others(None, reads, reads):
            pass

    def _wait_for_oldest(self) -> None:
        """Wait until no more stores are under way than may be. A failure is told to whoever wants the group."""
        while len(self._under_way) > self.depth:
            # Another thread may be faster.
            with suppress(TransferError, IndexError):
                self._under_way.popleft().synchronize()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(CLOSED)


def _described(trees: Trees, name: str, spec: Spec, index: int, leaf: Any) -> ShapeDtype:
    found = None if isinstance(leaf, Transfer) else trees.describe(leaf)
    if found is None:
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise TypeError(f"group {name!r}: {path(spec, index)} is a {kind}: expected an array of the device or of NumPy")
    check_dtype(found[1])
    return found


def _read_only(array: Array) -> Array:
    view = array[...]
    view.flags.writeable = False
    return view
