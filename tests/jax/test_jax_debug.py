"""Debug mode with JAX on the CPU, and with loops over global batches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

from tests.core.fakes import held
from xferlib import SourceRewrittenError
from xferlib.stager import Stager


@pytest.fixture
def cpu(stager: Stager) -> Iterator[Stager]:
    """A stager in debug mode on the CPU, also where JAX computes on a GPU by default."""
    from xferlib_jax._cpu import CpuStager

    with Stager(CpuStager(conformance.bench().jax.local_devices(backend="cpu")[0]), debug=True) as opened:
        yield opened


def pinned(stager: Stager) -> Any:
    array = stager.empty_pinned(1000, np.float32)
    array[:] = 1
    return array


def test_a_pinned_source_that_is_written_to_too_early_is_told(cpu: Stager) -> None:
    source = pinned(cpu)
    with held(cpu.backend.h2d):  # type: ignore[attr-defined]  # The engine of JAX on the CPU.
        transfer = cpu.put({"x": source})
        source[3] = 2
    for _ in range(2):
        with pytest.raises(SourceRewrittenError, match=r"tree\.x, bytes 0 to 3999 of 4000"):
            _ = transfer.value


def test_a_loop_that_gets_what_it_computes_is_told_nothing(cpu: Stager) -> None:
    source = pinned(cpu)
    for number in range(10):
        source[:] = number
        assert (cpu.get(cpu.put(source).value + 1).result() == number + 1).all()


def test_a_global_batch_whose_source_was_rewritten_is_told_by_the_line_that_began_the_loop(cpu: Stager) -> None:
    import jax
    import xferlib_jax

    source, rewrote = pinned(cpu), threading.Event()

    def batches() -> Iterator[Any]:
        for number in range(10):
            source[:] = number
            if number:
                rewrote.set()
            yield {"x": source}

    device = cpu.backend.jax_device  # type: ignore[attr-defined]  # Of both backends of the package.
    if device not in jax.local_devices():
        pytest.skip("JAX computes elsewhere here")
    with held(cpu.backend.h2d) as gate:  # type: ignore[attr-defined]  # As above.
        loop = xferlib_jax.prefetch(batches(), jax.sharding.SingleDeviceSharding(device), stagers=[cpu], rewrites=False)
        where = sys._getframe().f_lineno - 1
        assert rewrote.wait(10)
        gate.set()
        with pytest.raises(SourceRewrittenError, match=rf"called at {__file__}:{where}, on the thread of the pipeline"):
            for batch in loop:
                cpu.get(batch["x"]).result()
    loop.close()
    # It had begun others besides.
    with suppress(SourceRewrittenError):
        cpu.close()
