"""Several backends in one process, on one device: each right, none holding up another. Whatever else is installed takes part."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from xferlib_numba import conformance

import xferlib
from xferlib.conformance import StagerConformance
from xferlib.conformance.base import ThreadedCalls
from xferlib.conformance.values import LARGE, assert_same, words
from xferlib.registry import backend_module
from xferlib.stager import Stager

STEPS = 2000
IN_FLIGHT = 4


class Party(NamedTuple):
    laws: StagerConformance
    stager: Stager


@pytest.fixture
def parties(stager: Stager) -> Iterator[dict[str, Party]]:
    """All backends that are ready here, warm."""
    required = os.environ.get("XFERLIB_REQUIRE", "").split(",")
    with ExitStack() as stack:
        found: dict[str, Party] = {}
        for name in xferlib.backends():
            laws = hooks_of(name)
            try:
                own = Stager(laws.open())
            except xferlib.BackendUnavailableError:
                if name in required:
                    raise
                continue
            stack.callback(laws.calls.join, laws.deadline_seconds)
            found[name] = Party(laws, stack.enter_context(own))
        if len(found) < 2:
            pytest.skip("no other backend is ready here")
        for party in found.values():
            party.laws.warm(party.stager, words(1, LARGE))
        yield found


def hooks_of(name: str) -> StagerConformance:
    module = backend_module(name, "conformance")
    assert module is not None
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (hooks,) = [kind for kind in classes if issubclass(kind, StagerConformance)]
    laws: StagerConformance = hooks()
    laws.calls = ThreadedCalls()
    return laws


def test_transfers_complete_while_the_compute_of_all_others_is_held(parties: dict[str, Party]) -> None:
    values = words(1, LARGE)
    for name, (laws, stager) in parties.items():
        source, array = laws.pinned(stager, values), laws.from_numpy(values)
        with ExitStack() as stack:
            others = [party for other, party in parties.items() if other != name]
            holds = [stack.enter_context(party.laws.hold_compute(party.stager.backend)) for party in others]
            put = laws.assert_returns(lambda stager=stager, source=source: stager.put(source))  # type: ignore[misc]  # defaults
            laws.assert_completes(put)
            get = laws.assert_returns(lambda stager=stager, array=array: stager.get(array))  # type: ignore[misc]  # defaults
            laws.assert_completes(get)
            assert all(hold.held for hold in holds)
        assert_same(laws.to_numpy(put.value), values)
        assert_same(get.value, values)


def test_a_mixed_run_keeps_all_data_apart(parties: dict[str, Party]) -> None:
    order = list(parties.values())
    under_way: deque[tuple[Any, int]] = deque()
    wrong = 0
    for step in range(STEPS):
        laws, stager = order[step % len(order)]
        seed = step % 97
        array = stager.put(laws.pinned(stager, words(seed, 64 << 10))).value
        under_way.append((stager.get(array), seed))
        del array
        if len(under_way) > IN_FLIGHT:
            transfer, seed = under_way.popleft()
            wrong += not np.array_equal(transfer.value, words(seed, 64 << 10))
    wrong += sum(not np.array_equal(transfer.value, words(seed, 64 << 10)) for transfer, seed in under_way)
    assert wrong == 0


def test_a_kernel_of_numba_reads_a_cupy_array_in_stream_order(parties: dict[str, Party]) -> None:
    if "cupy" not in parties:
        pytest.skip("CuPy is not ready here")
    values, bench = words(1), conformance.bench()
    laws, stager = parties["cupy"]
    stream = bench.non_blocking()
    source = laws.pinned(stager, values)
    bench.read_on(stream, bench.array(values))()
    with laws.hold_copies(stager.backend, "h2d") as hold:
        transfer = stager.put(source, stream=stream)
        array = bench.cuda.as_cuda_array(transfer.value, sync=False)
        seen = laws.calls.start(bench.read_on(stream, array))
        laws.assert_stays(lambda: not seen.done(), hold)
    assert_same(seen.result(laws.deadline_seconds), values)
