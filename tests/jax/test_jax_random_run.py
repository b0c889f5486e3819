"""Thousands of steps of random sizes, random delays and random retention: every sum is right, and no memory piles up.

Delays are device work, of which a step gets a random amount; nothing sleeps. A step's batch is summed where it lies, or given away
and written to in place, or brought back as it is; then it is dropped at once, or kept for a while, or an alias of it is.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from xferlib_jax import conformance

from xferlib.conformance import StagerConformance
from xferlib.stager import Stager
from xferlib.transfer import Transfer

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

STEPS_ON_GPU, STEPS_ON_CPU = 10_000, 1_000
CLASSES = tuple(16 << shift for shift in range(0, 15, 2))
"""Words: 64 bytes to 1 MiB."""
MORE_SIZES = 24
"""Random, but drawn once: each size that is computed with is compiled."""
MOST_WORDS = CLASSES[-1]
DELAYS = (0, 0, 2, 20, 100)
"""Products of matrices."""
IN_FLIGHT = 8
KEPT = 40
"""Arrays at most."""
PINNED_LIMIT = 256 << 20
SLACK_NBYTES = 4 << 20
"""What one may have more than another that did the same: a batch or two of the largest."""


class Footprint(NamedTuple):
    pinned_nbytes: int
    pinned_used_nbytes: int
    device_nbytes: int
    jax_nbytes: int
    """As JAX counts its own memory; 0 where it does not."""


@final
class Compute:
    """Functions of JAX's, compiled for each size when it first comes."""

    def __init__(self) -> None:
        jax = conformance.bench().jax
        after = jax.lax.optimization_barrier

        def total(x: Any, token: Any) -> Any:
            x, _ = after((x, token))
            return (x * (2 * jax.lax.iota(np.uint32, x.size) + 1)).sum(dtype=np.uint32)

        def inverted(x: Any, token: Any) -> Any:
            x, _ = after((x, token))
            return ~x

        def busy(matrix: Any, products: int) -> Any:
            return jax.lax.fori_loop(0, products, lambda _, product: product @ matrix * np.float32(0.01), matrix)

        self.total = jax.jit(total)
        self.inverted_in_place = jax.jit(inverted, donate_argnums=0)
        self._matrix = conformance.bench().array(np.ones((64, 64), np.float32))
        self._busy = {products: jax.jit(lambda matrix, products=products: busy(matrix, products)) for products in set(DELAYS)}

    def delay(self, products: int) -> Any:
        """Start device work; what takes the result waits for it."""
        return self._busy[products](self._matrix)


def expected_total(values: Array) -> int:
    weights = 2 * np.arange(values.size, dtype=np.uint32) + np.uint32(1)
    return int((values * weights).sum(dtype=np.uint32))


@final
class RandomRun:
    """Steps, and what they have under way. Seeded: two runs do the same, but for what the device decides."""

    def __init__(self, laws: StagerConformance, stager: Stager) -> None:
        self._laws = laws
        self._stager = stager
        self._random = random.Random(20)
        self._noise = np.random.default_rng(20).integers(0, 1 << 32, 2 * MOST_WORDS, dtype=np.uint32)
        self._sizes = (*CLASSES, *(self._random.randint(1, MOST_WORDS) for _ in range(MORE_SIZES)))
        self._compute = Compute()
        self._checks: deque[Callable[[], bool]] = deque()
        self._kept: list[tuple[Any, int]] = []
        self.wrong = 0

    def steps(self, count: int) -> None:
        ways = (self._sum, self._sum, self._give_away, self._bring_back)
        for _ in range(count):
            values = self._values()
            token = self._compute.delay(self._random.choice(DELAYS))
            array = self._put(values).value
            self._random.choice(ways)(array, values, token)
            del array
            self._drop_some()
            while len(self._checks) > self._random.randint(0, IN_FLIGHT):
                self._check()

    def settle(self) -> Footprint:
        """Check and drop everything, give idle memory back, and return what is held then."""
        while self._checks:
            self._check()
        while self._kept:
            array, total = self._kept.pop()
            self.wrong += int(self._compute.total(array, self._compute.delay(0))) != total
            del array
        gc.collect()
        # What JAX let go of last is found out by asking again.
        for _ in range(2):
            self._put(self._noise[:1]).result()
            gc.collect()
        self._stager.trim()
        stats = self._stager.stats()
        return Footprint(stats.pinned_nbytes, stats.pinned_used_nbytes, stats.device_nbytes, jax_nbytes("bytes_in_use"))

    def _values(self) -> Array:
        words = self._random.choice(self._sizes)
        start = self._random.randint(0, MOST_WORDS)
        return self._noise[start : start + words] ^ np.uint32(self._random.getrandbits(32))

    def _put(self, values: Array) -> Transfer:
        """Put from pinned memory, which is dropped at once, or now and then from pageable memory, which is written over."""
        if self._random.random() < 0.9:
            return self._stager.put(self._laws.pinned(self._stager, values))
        source = values.copy()
        transfer = self._stager.put(source)
        source[...] = 0
        return transfer

    def _sum(self, array: Any, values: Array, token: Any) -> None:
        result, total = self._compute.total(array, token), expected_total(values)
        self._checks.append(lambda: int(result) == total)
        self._keep(array, total)

    def _give_away(self, array: Any, values: Array, token: Any) -> None:
        """The result lies in the memory that was put, where the platform lets it."""
        result = self._compute.inverted_in_place(array, token)
        transfer = self._stager.get(result)
        self._checks.append(lambda: np.array_equal(transfer.result(), ~values))
        self._keep(result, expected_total(~values))

    def _bring_back(self, array: Any, values: Array, token: Any) -> None:
        out = self._laws.pinned(self._stager, np.zeros_like(values)) if self._random.random() < 0.5 else None
        transfer = self._stager.get(array, out=out)
        self._checks.append(lambda: np.array_equal(transfer.result(), values))
        self._keep(array, expected_total(values))

    def _keep(self, array: Any, total: int) -> None:
        chance = self._random.random()
        if chance < 0.3:
            self._kept.append((array, total))
        elif chance < 0.4:
            self._kept.append((conformance.bench().jax.device_put(array, array.device), total))

    def _drop_some(self) -> None:
        while len(self._kept) > self._random.randint(0, KEPT):
            array, total = self._kept.pop(self._random.randrange(len(self._kept)))
            if self._random.random() < 0.2:
                # What was kept is still what it was.
                result = self._compute.total(array, self._compute.delay(0))
                self._checks.append(lambda result=result, total=total: int(result) == total)  # type: ignore[misc]  # defaults

    def _check(self) -> None:
        self.wrong += not self._checks.popleft()()


def jax_nbytes(name: str) -> int:
    found: dict[str, int] = conformance.bench().device.memory_stats() or {}
    return found.get(name, 0)


def peaks(stager: Stager) -> tuple[int, ...]:
    stats = stager.stats()
    return stats.pinned_peak_nbytes, stats.device_peak_nbytes, jax_nbytes("peak_bytes_in_use")


def test_a_random_run_is_right_and_leaves_nothing_behind(laws: StagerConformance, stager: Stager) -> None:
    steps = STEPS_ON_GPU if stager.on_gpu else STEPS_ON_CPU
    with Stager(laws.open(), pinned_limit=PINNED_LIMIT) as own:
        run = RandomRun(laws, own)
        run.steps(steps // 2)
        half, half_peaks = run.settle(), peaks(own)
        run.steps(steps - steps // 2)
        whole, whole_peaks = run.settle(), peaks(own)
    # Shown if the test fails, or if it is asked for.
    print(half, whole, half_peaks, whole_peaks)
    assert run.wrong == 0
    for before, after in zip(half, whole, strict=True):
        assert after - before <= SLACK_NBYTES, (half, whole)
    # Memory idle between steps included: chance alone makes a second half need a little more than the first.
    for before, after in zip(half_peaks, whole_peaks, strict=True):
        assert after <= 1.5 * before, (half_peaks, whole_peaks)
