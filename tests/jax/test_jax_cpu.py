"""JAX on the CPU: copy engines that are threads, arrays that are not computed yet, and computations that fail."""

from __future__ import annotations

import gc
import glob
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

import xferlib
from tests import children
from tests.core.fakes import on_thread
from tests.jax.test_jax_layouts import by_import
from xferlib.conformance.values import assert_same, words
from xferlib.errors import BackendUnavailableError, TransferError
from xferlib.stager import Stager


@pytest.fixture
def cpu(stager: Stager) -> Iterator[Stager]:
    """A stager on the CPU, also where JAX computes on a GPU by default."""
    from xferlib_jax._cpu import CpuStager

    with Stager(CpuStager(conformance.bench().jax.local_devices(backend="cpu")[0])) as opened:
        yield opened


def on_cpu(array: np.ndarray) -> Any:
    jax = conformance.bench().jax
    return jax.device_put(array, jax.local_devices(backend="cpu")[0])


def test_a_trace_has_the_copies_with_their_bytes_and_lines(cpu: Stager) -> None:
    array = np.arange(3 << 20, dtype=np.uint8)
    jax = conformance.bench().jax
    with xferlib.trace(gpu=False) as traced:
        put = cpu.put(array).value
        computed = jax.jit(lambda x: x + np.uint8(1))(put)  # Not there yet as its get begins.
        cpu.get(computed).result()
    lines = {"h2d": line_of("put = cpu.put"), "d2h": line_of("cpu.get(computed)")}
    for kind, line in lines.items():
        copies = [event for event in traced.recording.events if event.kind == kind]
        assert sum(event.nbytes for event in copies) == array.nbytes
        assert {event.site.rpartition("/")[2] for event in copies} == {f"test_jax_cpu.py:{line}"}
        assert all(event.issued <= event.start <= event.end for event in copies)
        assert {event.memory for event in copies} == {""}
    streams = [{event.stream for event in traced.recording.events if event.kind == kind} for kind in lines]
    assert [len(of) for of in streams] == [1, 1]
    assert streams[0] != streams[1]
    assert [device.name for device in traced.summary().devices] == ["the CPU (JAX)"]


def test_a_trace_has_a_copy_of_what_was_not_computed_when_it_began(cpu: Stager) -> None:
    from xferlib_jax._engine import Engine
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    gate, array = threading.Event(), on_cpu(words(1))

    class Late:
        def block_until_ready(self) -> None:
            assert gate.wait(20)

        def __dlpack__(self) -> Any:
            return array.__dlpack__()

    promises = Promises(Readings(lambda: None))
    promise = promises.make(Late())
    engine = Engine("engine", promises, "d2h")
    target = np.zeros(array.nbytes, np.uint8)
    try:
        with xferlib.trace(gpu=False) as traced:
            engine.copy(target.ctypes.data, promise.start, target.nbytes)
            gate.set()
            engine.record().synchronize()
    finally:
        engine.close()
    assert bytes(target) == np.asarray(array).tobytes()
    assert [(event.kind, event.nbytes) for event in traced.recording.events] == [("d2h", target.nbytes)]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip().startswith(text))


def test_what_could_not_be_computed_fails_the_next_event_of_whoever_copied_it() -> None:
    pytest.importorskip("jax")
    from xferlib_jax._engine import CopyError, Engine
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    class Broken:
        def block_until_ready(self) -> None:
            raise ArithmeticError("on purpose")

    promises = Promises(Readings(lambda: None))
    promise = promises.make(Broken())
    engine = Engine("engine", promises)
    target = np.zeros(8, np.uint8)
    try:
        # Twice, as of two leaves.
        for _ in range(2):
            engine.copy(target.ctypes.data, promise.start, 8)
        # Another thread copied nothing that could not be computed.
        on_thread(lambda: engine.record().synchronize()).result(10)
        first, second = engine.record(), engine.record()
        for _ in range(2):
            with pytest.raises(CopyError, match="could not be computed"):
                first.synchronize()
            with pytest.raises(CopyError, match="could not be computed"):
                first.done()
        # It covers the copy, too, and is another transfer's.
        second.synchronize()
        assert second.done()
    finally:
        engine.close()


def test_an_array_that_was_computed_when_it_was_promised_is_not_asked_again(cpu: Stager) -> None:
    """It may have been deleted since."""
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    class Deleted:
        def block_until_ready(self) -> None:
            raise RuntimeError("deleted")

    array = on_cpu(words(1))
    promise = Promises(Readings(lambda: None)).make(Deleted(), array.__dlpack__())
    assert promise.wait() == array.unsafe_buffer_pointer()


def test_a_promised_array_in_another_order_is_laid_out_once(cpu: Stager) -> None:
    """Each of the engine's chunks asks for its memory."""
    from xferlib_jax._promise import Promises
    from xferlib_jax._reading import Readings

    array = by_import(np.arange(35, dtype=np.float32).reshape(5, 7))
    promise = Promises(Readings(lambda: None)).make(array)
    first = promise.wait()
    assert first != array.unsafe_buffer_pointer()
    assert promise.wait() == first


def test_what_was_read_is_let_go_of_by_one_look() -> None:
    from xferlib_jax._reading import Readings

    looks: list[None] = []
    readings = Readings(lambda: looks.append(None))
    kept = [readings.make(None, None) for _ in range(3)]
    readings.let_go()
    assert looks == []
    kept.clear()
    readings.let_go()
    readings.let_go()
    assert len(looks) == 1


def test_jax_is_told_to_let_go_of_arrays_beside_one_that_cannot_be_exported() -> None:
    pytest.importorskip("jax")
    from xferlib_jax._exports import found_together
    from xferlib_jax._reading import Readings

    def export(array: Any, stream: int | None = None) -> Any:
        if array is arrays[1]:
            raise RuntimeError("deleted meanwhile")
        return array.__dlpack__()

    looks: list[None] = []
    readings = Readings(lambda: looks.append(None))
    arrays = [on_cpu(np.arange(3, dtype=np.int32)), on_cpu(np.arange(4, dtype=np.int32))]
    with pytest.raises(RuntimeError, match="deleted meanwhile"):
        found_together(arrays, export, None, readings)
    gc.collect()
    readings.let_go()
    assert len(looks) == 1


def test_memory_side_by_side_is_pinned_each_and_only_what_was_pinned_is_unpinned() -> None:
    from xferlib_jax._memory import Memory, MemoryCallError

    memory = Memory()
    for address in (0x2000, 0x1000, 0x3000):
        memory.pin(address, 0x1000)
    with pytest.raises(MemoryCallError, match="pinned already"):
        memory.pin(0x3FFF, 1)
    for address in (0x1000, 0x2000, 0x3000):
        memory.unpin(address)
    own = memory.alloc_pinned(4096)
    with pytest.raises(MemoryCallError, match="no memory was pinned"):
        memory.unpin(own)
    assert memory.is_pinned(own, 4096)
    memory.free_pinned(own)
    assert not memory.is_pinned(own, 4096)


def test_an_address_that_stands_for_an_array_leads_to_all_of_it(cpu: Stager) -> None:
    """Pageable memory is filled in pieces: the later ones lie behind the address."""
    values = words(1, 20 << 20)
    jax = conformance.bench().jax
    array = on_cpu(values)
    slow = jax.jit(lambda x: jax.lax.optimization_barrier((x, jax.lax.fori_loop(0, 60, lambda i, y: y @ y, np.ones((300, 300))))))
    result, _ = slow(array)
    out = np.empty_like(values)
    transfer = cpu.get(result, out=out)
    transfer.synchronize()
    assert_same(out, values)


def test_a_source_that_is_deleted_before_it_is_computed_fails_loudly(cpu: Stager) -> None:
    if conformance.bench().device.platform != "cpu":
        # Held work of the bench's is the GPU's there; what is ready is tested for both.
        array = on_cpu(words(1))
        array.delete()
        with pytest.raises(ValueError, match="deleted"):
            cpu.get(array)
        return
    values = words(1)
    conformance.bench().read(on_cpu(values), conformance.bench().token).block_until_ready()
    with conformance.bench().hold() as hold:
        array = conformance.bench().read(on_cpu(values), hold.token)
        transfer = cpu.get(array)
        array.delete()
    with pytest.raises(TransferError, match="could not be computed"):
        transfer.result()
    assert_same(cpu.get(on_cpu(values)).result(), values)


def test_only_the_first_device_of_the_cpu_is_there(stager: Stager) -> None:
    program = (
        "import numpy as np, jax, pytest, xferlib\n"
        "assert len(jax.devices()) == 4\n"
        "with pytest.raises(xferlib.BackendUnavailableError, match='only number 0'): xferlib.stager('jax', device=1)\n"
        "with xferlib.stager('jax') as s:\n"
        "    x = np.arange(8, dtype=np.int32)\n"
        "    mesh = jax.sharding.Mesh(np.array(jax.devices()), ('x',))\n"
        "    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x')))\n"
        "    with pytest.raises(ValueError, match='spread over 4 devices'): s.get(spread)\n"
        "    with pytest.raises(ValueError, match='this stager on'): s.get(jax.device_put(x, jax.devices()[2]))\n"
        "    first = spread.addressable_shards[0].data\n"
        "    assert s.get(first).result().tolist() == [0, 1]\n"
        "    assert s.put(x).result().device == jax.devices()[0]\n"
    )
    assert_runs(program, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")


def test_a_platform_that_is_missing_is_said_with_what_to_install(stager: Stager) -> None:
    program = (
        "import pytest, xferlib\n"
        "with pytest.raises(xferlib.BackendUnavailableError, match=r'JAX has no device .*rocm.*JAX_PLATFORMS=cpu'):\n"
        "    xferlib.stager('jax')\n"
    )
    assert_runs(program, JAX_PLATFORMS="rocm")


def test_a_gpu_that_jax_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, stager: Stager) -> None:
    from xferlib_jax import _probe, diagnosis

    class Config:
        jax_platforms = None

    class Jax:
        config = Config
        __file__ = "jax/__init__.py"
        __version__ = "0.10.2"

        @staticmethod
        def local_devices() -> list[Any]:
            return conformance.bench().jax.local_devices(backend="cpu")  # type: ignore[no-any-return]  # JAX may be untyped here

    monkeypatch.setitem(sys.modules, "jax", Jax)
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(diagnosis, "versions", lambda: {"jax": "1", "jaxlib": "1"})
    with pytest.raises(BackendUnavailableError, match=r"no plugin for it.*JAX_PLATFORMS=cpu"):
        _probe.open_backend(0)
    assert any("no plugin" in finding for finding in diagnosis.findings())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnosis.findings() == []
    _probe.open_backend(0).close()


def test_an_old_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import _probe

    class Jax:
        __file__ = "jax/__init__.py"
        __version__ = "0.9.1"

    monkeypatch.setitem(sys.modules, "jax", Jax)
    with pytest.raises(BackendUnavailableError, match=r"JAX 0\.9\.1 is older than 0\.10\.2"):
        _probe.open_backend(0)


def test_a_missing_jax_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import _probe

    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(BackendUnavailableError, match=r'JAX is not installed. Install it with: pip install "jax\[cuda12\]>='):
        _probe.open_backend(0)


def assert_runs(program: str, **environment: str) -> None:
    child = children.run([sys.executable, "-c", program], seconds=100, env=os.environ | environment)
    assert child.returncode == 0, child.stderr
