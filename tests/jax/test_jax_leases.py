"""When memory comes back: whatever kept an array's buffer, on whatever thread it is let go, and when the process ends."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from xferlib_jax import conformance

import xferlib
from tests import children
from xferlib.conformance.values import assert_same, words
from xferlib.stager import Stager

ROUNDS = 150
USED = b"used_dltensor"
"""Kept: a capsule has its name by its address."""
SECONDS = 5.0


class Lease:
    """Says when it ends."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.set()


def adopted(backend: Any, block: Any, values: np.ndarray, lease: object) -> Any:
    """Return an array over the block, filled."""
    backend.copy_h2d(block.address, values.ctypes.data, values.nbytes)
    event = backend.record_h2d()
    event.synchronize()
    return backend.as_array(block, 0, values.shape, values.dtype, after=event, lease=lease)


def assert_ends(backend: Any, ended: threading.Event) -> None:
    deadline = time.monotonic() + SECONDS
    while not ended.is_set():
        assert time.monotonic() < deadline, "the lease has not ended"
        backend.sweep()
        time.sleep(0.001)


def pinned(stager: Stager, values: np.ndarray) -> np.ndarray:
    copy = stager.empty_pinned(values.shape, values.dtype)
    copy[...] = values
    return copy


def test_a_lease_lasts_as_long_as_any_alias_and_no_longer(stager: Stager) -> None:
    backend: Any = stager.backend
    values = pinned(stager, words(1))
    block = backend.alloc_device(values.nbytes)
    names = [name for name, _ in conformance.TestJax().aliases(conformance.bench().array(words(1)))]
    shared = set()
    for name in names:
        ended = threading.Event()
        array = adopted(backend, block, values, Lease(ended))
        (alias,) = [alias for known, alias in conformance.TestJax().aliases(array) if known == name]
        alias.block_until_ready()
        del array
        gc.collect()
        backend.sweep()
        if alias.unsafe_buffer_pointer() == block.address:
            shared.add(name)
            assert not ended.is_set(), name
        del alias
        gc.collect()
        assert_ends(backend, ended)
    assert shared >= {"asarray", "put on its own device", "assembled", "on a mesh of one", "shard", "imported from its capsule"}


def test_a_lease_follows_a_donated_array_into_its_result(stager: Stager) -> None:
    backend: Any = stager.backend
    values = pinned(stager, words(1))
    block = backend.alloc_device(values.nbytes)
    ended = threading.Event()
    array = adopted(backend, block, values, Lease(ended))
    result = conformance.bench().donated(array)
    del array
    result.block_until_ready()
    gc.collect()
    backend.sweep()
    # On the CPU JAX writes the result elsewhere.
    assert result.unsafe_buffer_pointer() != block.address or not ended.is_set()
    del result
    gc.collect()
    assert_ends(backend, ended)


def test_a_lease_outlives_a_reader_that_is_held(stager: Stager) -> None:
    backend: Any = stager.backend
    values = pinned(stager, words(1))
    block = backend.alloc_device(values.nbytes)
    conformance.bench().read(adopted(backend, block, values, None), conformance.bench().token).block_until_ready()
    ended = threading.Event()
    array = adopted(backend, block, values, Lease(ended))
    with conformance.bench().hold() as hold:
        seen = conformance.bench().read(array, hold.token)
        del array
        gc.collect()
        backend.sweep()
        # Where the deleter comes too early, a fence stands in for it.
        assert not ended.is_set() or not backend.retire([]).done()
        assert hold.held
    assert_same(conformance.bench().values(seen), words(1))
    assert_ends(backend, ended)


def test_a_lease_ends_by_a_sweep_when_its_stager_is_closed(laws: conformance.TestJax, stager: Stager) -> None:
    ended = threading.Event()
    backend: Any = laws.open()
    values = words(1)
    block = backend.alloc_device(values.nbytes)
    array = adopted(backend, block, pinned(stager, values), Lease(ended))
    backend.close()
    assert_same(conformance.bench().values(array), values)
    backend.sweep()
    assert not ended.is_set()
    del array
    assert_ends(backend, ended)
    backend.free_device(block)


def test_memory_comes_back_though_the_stager_that_read_it_is_called_no_more(stager: Stager) -> None:
    """JAX has noted what the get held, and looks at that when it is asked to. Nobody but the closed stager's reaper asks."""
    with xferlib.stager("jax") as owner:
        array = owner.put(pinned(owner, words(1))).result()
    transfer = stager.get(array)
    stager.backend.record_d2h().synchronize()
    assert owner.stats().device_nbytes
    # It would have JAX look, too.
    gc.disable()
    try:
        del array
        deadline = time.monotonic() + SECONDS
        while owner.stats().device_nbytes:
            assert time.monotonic() < deadline, "the memory has not come back"
            time.sleep(0.01)
    finally:
        gc.enable()
    assert_same(transfer.result(), words(1))


def test_threads_that_read_and_drop_leave_nothing_behind(stager: Stager) -> None:
    """A deleter that asked for the GIL would hang this."""
    jax = conformance.bench().jax
    work = jax.jit(lambda x: (x @ x).sum())
    work(np.ones((64, 64), np.float32)).block_until_ready()
    failures: list[BaseException] = []

    def churn(seed: int) -> None:
        try:
            for turn in range(ROUNDS):
                values = np.full((64, 64), seed + turn % 7, np.float32)
                result = work(stager.put(values).value)
                if turn % 5 == 0:
                    assert float(result) == 64.0**3 * (seed + turn % 7) ** 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    jax.block_until_ready(jax.live_arrays())
    gc.collect()
    # Blocks are used again: what was taken is a few dozen of them, not one for each put.
    assert stager.stats().device_nbytes < 3 * ROUNDS * 64 * 64 * 4 / 3


def test_arrays_are_made_by_the_fast_import_and_by_the_public_one_alike(stager: Stager) -> None:
    backend: Any = stager.backend
    assert backend._imports.by_private_call
    values = pinned(stager, words(1))
    block = backend.alloc_device(values.nbytes)
    for _ in range(2):
        ended = threading.Event()
        array = adopted(backend, block, values, Lease(ended))
        assert (array.device, array.committed, array.weak_type) == (conformance.bench().device, True, False)
        assert_same(conformance.bench().values(array), words(1))
        assert not ended.is_set()
        del array
        assert_ends(backend, ended)
        backend._imports._convert = None


def test_thousands_of_arrays_that_live_keep_their_leases_and_no_others(stager: Stager) -> None:
    backend: Any = stager.backend
    values = pinned(stager, words(1))
    block = backend.alloc_device(values.nbytes)
    ended = [threading.Event() for _ in range(3_000)]
    arrays = [adopted(backend, block, values, Lease(event)) for event in ended]
    backend.sweep()
    assert not any(event.is_set() for event in ended)
    del arrays[::2]
    gc.collect()
    for event in ended[::2]:
        assert_ends(backend, event)
    assert not any(event.is_set() for event in ended[1::2])


def test_an_import_that_fails_lets_its_lease_go(stager: Stager) -> None:
    backend: Any = stager.backend
    ended = threading.Event()
    block = backend.alloc_device(256)
    wide = np.dtype(np.float64)
    with conformance.bench().jax.enable_x64(False), pytest.raises(TypeError):
        backend.as_array(block, 0, (2,), wide, after=backend.record_h2d(), lease=Lease(ended))
    gc.collect()
    assert ended.is_set()


def test_the_deleter_does_nothing_but_to_mark_its_struct() -> None:
    from xferlib_jax._capsule import Capsules

    capsules = Capsules()
    memory = (ctypes.c_uint8 * 1024)()
    address = -(-ctypes.addressof(memory) // 256) * 256
    ended = threading.Event()
    capsule = capsules.lend(address, (2, 3), 1, 8, (1, 0), Lease(ended), imported)
    (start,) = capsules._live
    before = ctypes.string_at(start, 64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(capsules._deleter)(start)
    after = ctypes.string_at(start, 64)
    assert after[4:] == before[4:]
    assert after[:4] != before[:4]
    assert not ended.is_set()
    capsules.sweep()
    assert ended.is_set()
    assert (capsules._live, len(capsules._free)) == ({}, 512)
    del capsule


def test_an_import_that_is_cut_off_ends_its_lease_as_far_as_it_got() -> None:
    from xferlib_jax._capsule import Capsules

    capsules = Capsules()
    memory = (ctypes.c_uint8 * 1024)()
    address = -(-ctypes.addressof(memory) // 256) * 256

    def refuse(capsule: Any) -> Any:
        raise ArithmeticError("not imported")

    def lose(capsule: Any) -> Any:
        starts.append(next(iter(capsules._live)))
        imported(capsule)
        raise ArithmeticError("imported, and lost")

    def lend(code: int, convert: Any) -> threading.Event:
        ended = threading.Event()
        with pytest.raises((ArithmeticError, struct.error)):
            capsules.lend(address, (2, 3), code, 8, (1, 0), Lease(ended), convert)
        gc.collect()
        capsules.sweep()
        return ended

    starts: list[int] = []
    # Never seen by anybody; refused; and imported, whatever came afterwards.
    assert lend(-1, refuse).is_set()
    assert len(capsules._free) == 512
    assert lend(1, refuse).is_set()
    assert len(capsules._free) == 511
    ended = lend(1, lose)
    assert not ended.is_set()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(capsules._deleter)(starts[0])
    capsules.sweep()
    assert ended.is_set()
    assert (len(capsules._free), capsules._live) == (511, {})


MANY = 600
"""More than are looked at one by one, and more than a chunk has."""


@pytest.mark.parametrize("others", [0, 3, MANY])
def test_leases_end_whose_deleters_were_called_however_many_others_there_are(others: int) -> None:
    from xferlib_jax._capsule import BIAS, Capsules

    capsules = Capsules()
    memory = (ctypes.c_uint8 * 1024)()
    address = -(-ctypes.addressof(memory) // 256) * 256
    delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(capsules._deleter)

    def lend() -> tuple[int, threading.Event]:
        ended, before = threading.Event(), set(capsules._live)
        capsules.lend(address, (2, 3), 1, 8, (1, 0), Lease(ended), imported)
        (start,) = set(capsules._live) - before
        return start, ended

    kept = [lend() for _ in range(others)]
    for _ in range(3):
        lent = [lend() for _ in range(5)]
        for start, _ in lent[1::2]:
            delete(start)
        capsules.sweep()
        assert [ended.is_set() for _, ended in lent] == [False, True] * 2 + [False]
        # What is free has no mark: whoever looks at all of a chunk would take it for one that was let go, as it is lent again.
        assert {capsules._words[slot.start].value for slot in capsules._free} == {BIAS}
        for start, _ in lent[::2]:
            delete(start)
        capsules.sweep()
        assert all(ended.is_set() for _, ended in lent)
        assert len(capsules._live) == others
    starts = [slot.start for slot in capsules._free]
    assert len(set(starts) | set(capsules._live)) == len(starts) + others == 512 * len(capsules._chunks)
    assert not any(ended.is_set() for _, ended in kept)


class Read(dict[int, Any]):
    """Words of structs, and how often one was asked for."""

    count = 0

    def __getitem__(self, start: int) -> Any:
        self.count += 1
        return super().__getitem__(start)


def test_a_sweep_over_many_arrays_that_live_looks_at_none_of_them_alone() -> None:
    """It is a part of every put and get."""
    from xferlib_jax._capsule import Capsules

    capsules = Capsules()
    memory = (ctypes.c_uint8 * 1024)()
    address = -(-ctypes.addressof(memory) // 256) * 256
    for _ in range(MANY):
        capsules.lend(address, (2, 3), 1, 8, (1, 0), None, imported)
    capsules._words = read = Read(capsules._words)
    capsules.sweep()
    assert read.count == 0
    assert len(capsules._live) == MANY


@pytest.mark.parametrize("others", [0, MANY])
def test_a_deleter_that_is_called_for_an_import_that_failed_frees_no_struct(others: int) -> None:
    from xferlib_jax._capsule import Capsules

    capsules = Capsules()
    memory = (ctypes.c_uint8 * 1024)()
    address = -(-ctypes.addressof(memory) // 256) * 256
    starts: list[int] = []

    def refuse(capsule: Any) -> Any:
        starts.append(next(reversed(capsules._live)))
        raise ArithmeticError("not imported")

    for _ in range(others):
        capsules.lend(address, (2, 3), 1, 8, (1, 0), None, imported)
    with pytest.raises(ArithmeticError):
        capsules.lend(address, (2, 3), 1, 8, (1, 0), None, refuse)
    capsules.sweep()
    free = len(capsules._free)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(capsules._deleter)(starts[0])
    capsules.sweep()
    assert (len(capsules._free), len(capsules._live)) == (free, others)
    assert starts[0] not in {slot.start for slot in capsules._free}


def imported(capsule: Any) -> Any:
    """Do with a capsule what an importer does."""
    name = ctypes.pythonapi.PyCapsule_SetName
    name.argtypes = (ctypes.py_object, ctypes.c_char_p)
    name(capsule, USED)
    return capsule


@pytest.mark.parametrize("closed", ["closed", "left open"])
def test_a_process_ends_well_with_arrays_alive_and_work_under_way(stager: Stager, closed: str) -> None:
    program = (
        "import numpy as np, xferlib, jax\n"
        "s = xferlib.stager('jax')\n"
        "f = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: y @ y * 1e-3, x))\n"
        "kept = [s.put(np.ones((200, 200), np.float32)).value for _ in range(4)]\n"
        "under_way = [f(x) for x in kept]; gets = [s.get(x) for x in under_way]\n"
        f"{'s.close()' if closed == 'closed' else ''}\n"
    )
    child = children.run([sys.executable, "-c", program], seconds=100)
    assert child.returncode == 0, child.stderr
