"""A program: a thousand steps that XLA runs as CUDA graphs, captures among them, beside threads that poll and transfer.

Run by `test_jax_command_buffers.py`, in a process of its own, since XLA reads its flags once. Writes what came out as JSON.
Arithmetic is exact: small whole numbers, and products with permutations.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

import xferlib
from xferlib.tracing.library import CALLBACK, DRIVER, ENTER, CuptiError, load

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

STEPS = 1_000
SIDE = 256
LAYERS = 6
MOST = 100
"""Values are below it, so that 32 bits of a float hold every sum."""
IN_FLIGHT = 4
KEPT = 24
"""Inputs at most: so they come at more addresses than XLA remembers a capture for."""
NEVER_SEEN_EVERY = 50
TRIM_EVERY = 200

# From cupti_driver_cbid.h.
LAUNCHES = {514: "cuGraphLaunch", 515: "cuGraphLaunch_ptsz"}
CAPTURES = {
    495: "begin",
    496: "begin_ptsz",
    539: "begin_v2",
    540: "begin_v2_ptsz",
    720: "begin_to_graph",
    721: "begin_to_graph_ptsz",
}


class Outcome(NamedTuple):
    wrong: int
    failures: list[str]
    transfers: int
    """What the thread beside the steps has moved there and back."""
    polls: int
    launches: int | None
    """Of CUDA graphs, by whomever; None where CUPTI cannot count."""
    captures: int | None


@final
class GraphCalls:
    """Counts launches of graphs and beginnings of captures in this process. `close` before the interpreter goes down."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self._library = load()
        self._callback = CALLBACK(self._entered)
        self._subscriber = ctypes.c_void_p()
        status = self._library.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None)
        if status != 0:
            raise CuptiError(f"cuptiSubscribe failed ({status})")
        for function in (*LAUNCHES, *CAPTURES):
            # An old CUPTI knows not all of them.
            self._library.cuptiEnableCallback(ctypes.c_uint32(1), self._subscriber, DRIVER, ctypes.c_uint32(function))

    def total(self, functions: dict[int, str]) -> int:
        return sum(self.seen[function] for function in functions)

    def close(self) -> None:
        self._library.cuptiUnsubscribe(self._subscriber)

    def _entered(self, _: int | None, domain: int, function: int, data: Any) -> None:
        if data.contents.site == ENTER:
            self.seen[function] += 1


@final
class Run:
    """The steps, and what goes on beside them."""

    def __init__(self, stager: xferlib.Stager, steps: int) -> None:
        self._stager = stager
        self._steps = steps
        self._random = random.Random(1)
        self._ended = threading.Event()
        self._recent: deque[xferlib.Transfer] = deque(maxlen=16)
        self.wrong = self.transfers = self.polls = 0
        self.failures: list[str] = []

    def run(self) -> None:
        beside = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._poll, self._transfer)]
        for thread in beside:
            thread.start()
        try:
            self._guarded(self._compute)
        finally:
            self._ended.set()
            for thread in beside:
                thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.failures.append(f"{work.__name__}: {error!r}")

    def _compute(self) -> None:
        import jax

        generator = np.random.default_rng(1)
        orders = [generator.permutation(SIDE) for _ in range(LAYERS)]
        matrices = [jax.device_put(np.eye(SIDE, dtype=np.float32)[:, order]) for order in orders]
        base = generator.integers(0, MOST, (SIDE, SIDE)).astype(np.float32)

        def layers(x: Any, matrices: list[Any]) -> tuple[Any, Any]:
            for matrix in matrices:
                x = jax.numpy.matmul(x, matrix, precision="highest") + 1
            return x, x.sum()

        step = jax.jit(layers)
        pending: deque[tuple[xferlib.Transfer, Any, Array]] = deque()
        kept: deque[Any] = deque()
        for number in range(self._steps):
            values = (base + number) % MOST
            x = self._put(values)
            y, total = step(x, matrices)
            pending.append((self._track(self._stager.get(y)), total, _expected(values, orders)))
            kept.append(x)
            for _ in range(len(kept) - self._random.randint(0, KEPT)):
                kept.popleft()
            del x, y
            if len(pending) > IN_FLIGHT:
                self._check(*pending.popleft())
        for transfer, total, expected in pending:
            self._check(transfer, total, expected)

    def _put(self, values: Array) -> Any:
        source = self._stager.empty_pinned(values.shape, values.dtype)
        source[...] = values
        return self._track(self._stager.put(source)).value

    def _track(self, transfer: xferlib.Transfer) -> xferlib.Transfer:
        self._recent.append(transfer)
        return transfer

    def _check(self, transfer: xferlib.Transfer, total: Any, expected: Array) -> None:
        right = np.array_equal(transfer.result(), expected) and float(total) == float(expected.sum(dtype=np.float64))
        self.wrong += not right

    def _poll(self) -> None:
        while not self._ended.is_set():
            for transfer in list(self._recent):
                transfer.done()
            self._stager.stats()
            self.polls += 1

    def _transfer(self) -> None:
        """Move arrays there and back, some of a size never seen: memory is then taken, page-locked and given back."""
        source = np.arange(1 << 20, dtype=np.uint32)
        turn = 0
        while not self._ended.is_set():
            turn += 1
            nbytes = 300_000 + 4_096 * turn if turn % NEVER_SEEN_EVERY == 0 else 65_536
            values = source[: nbytes // 4] + np.uint32(turn)
            self.wrong += not np.array_equal(self._stager.get(self._put(values)).result(), values)
            self.transfers += 1
            if turn % TRIM_EVERY == 0:
                self._stager.trim()


def _expected(values: Array, orders: list[Array]) -> Array:
    for order in orders:
        values = values[:, order] + 1
    return values


def main(steps: int = STEPS) -> Outcome:
    # Threads that poll must not keep those that XLA calls back from.
    sys.setswitchinterval(1e-4)
    with xferlib.stager("jax") as stager:
        try:
            calls = GraphCalls() if stager.on_gpu else None
        except CuptiError:
            calls = None
        run = Run(stager, steps)
        run.run()
        if calls is not None:
            calls.close()
    counts = (None, None) if calls is None else (calls.total(LAUNCHES), calls.total(CAPTURES))
    return Outcome(run.wrong, run.failures, run.transfers, run.polls, *counts)


if __name__ == "__main__":
    print(json.dumps(main()._asdict()))
