"""Starting transfers to the host. The invariants are those of `puts`."""

from __future__ import annotations

from typing import Any, TypeAlias, final

import numpy as np

from xferlib.checks import check_apart, check_out, describe
from xferlib.inflight import LARGE, Traffic
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.host import HostMemory
from xferlib.memory.pool import PinnedPool
from xferlib.protocol import Event, HostStager, Source
from xferlib.staging.ring import Staging
from xferlib.transfer import Transfer
from xferlib.tree import Spec, path, trees_of, unflatten

__all__ = ["Gets"]

Alike: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]


@final
class Gets:
    """The D2H half of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], host: HostMemory, pool: PinnedPool, staging: Staging, traffic: Traffic) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._host = host
        self._trees = trees_of(backend)
        self._pool = pool
        self._staging = staging
        self._d2h = traffic.d2h
        self._as_sources = getattr(backend, "as_sources", None)

    def start(self, tree: Any, out: Any, stream: object | None) -> Transfer:
        """Get a tree."""
        leaves, spec = self._trees.flatten(tree)
        if not leaves:
            raise ValueError(f"there is no array in {tree!r}: expected a device array, or a tree of them")
        given = None if out is None else self._trees.flatten_like(spec, out, name="out")
        alike = self._checked(leaves, spec, given)
        # What the arrays wait for now would hold up the copies that earlier gets still have to start.
        self._staging.wait_issued()
        sources = self._ordered(leaves, spec, stream)
        looks = sum([source.nbytes for source in sources]) >= LARGE
        if looks:
            # Before memory is asked for: mostly an earlier get is done, and its memory is what is wanted.
            self._d2h.reap()
        outs = [self._pool.empty(shape, dtype) for shape, dtype in alike] if given is None else given
        event, failures = self._begin(sources, outs, looked=looks)
        return Transfer(unflatten(spec, outs) if out is None else out, event, failures, True)

    def _checked(self, leaves: list[Any], spec: Spec, outs: list[Any] | None) -> list[Alike]:
        """Check everything that needs no order first: a leaf that is refused must not hold up transfers to come."""
        alike: list[Alike] = []
        known = None
        for index, leaf in enumerate(leaves):
            try:
                shape, dtype = self._described(leaf)
                if dtype is not known:
                    self._host.check_dtype(dtype)
                    # Hashing a dtype takes longer than the rest of a turn.
                    known = dtype
                if outs is not None:
                    check_out(outs[index], shape, dtype)
                alike.append((shape, dtype))
            except (TypeError, ValueError) as error:
                error.add_note(f"at {path(spec, index)}")
                raise
        if outs is not None and len(outs) > 1:
            check_apart([(address_of(array), array.nbytes) for array in outs], "out")
        return alike

    def _described(self, leaf: Any) -> Alike:
        try:
            return describe(leaf, self._backend.name)
        except TypeError:
            # The backend may know what this is, and what to do about it.
            self._backend.as_source(leaf)
            raise

    def _ordered(self, leaves: list[Any], spec: Spec, stream: object | None) -> list[Source]:
        if self._as_sources is not None and len(leaves) > 1:
            together: list[Source] | None = self._as_sources(leaves, stream)
            if together is not None:
                return together
        sources: list[Source] = []
        for index, leaf in enumerate(leaves):
            try:
                sources.append(self._backend.as_source(leaf, stream))
            except (TypeError, ValueError) as error:
                error.add_note(f"at {path(spec, index)}")
                raise
        return sources

    def _begin(self, sources: list[Source], outs: list[Array], *, looked: bool) -> tuple[Event, tuple[type[Exception], ...]]:
        """Start the copies; return the event of the last, and what it may raise."""
        pageable: list[tuple[int, Array]] = []
        try:
            nbytes = self._copy_pinned(sources, outs, pageable)
            event = self._d2h.add(nbytes, outs, sources, looked=looked) if nbytes or not pageable else None
            if pageable:
                # The CPU copy raises what NumPy and the system raise.
                return self._staging.land(pageable, sources, event), (Exception,)
        except BaseException:
            self._d2h.settle((sources, outs))
            raise
        assert event is not None
        return event, self._failures

    def _copy_pinned(self, sources: list[Source], outs: list[Array], pageable: list[tuple[int, Array]]) -> int:
        """Start the copies to pinned memory, and return their bytes; enter what goes elsewhere."""
        nbytes = 0
        for source, array in zip(sources, outs, strict=True):
            address = self._host.address(array)
            if address is None:
                # Subclasses may not be cut and shaped as a plain array is: a matrix always has two dimensions. A view: what is made
                # read-only meanwhile, as the arrays of a slot that goes back are, is written all the same, as by a copy engine.
                pageable.append((source.address, np.asarray(array)[...]))
            elif address:
                self._backend.copy_d2h(address, source.address, array.nbytes)
                nbytes += array.nbytes
        return nbytes
