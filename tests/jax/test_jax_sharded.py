"""Batches that several devices share. JAX's CPU has several only if it is told so when it starts, so the tests run in children.

Those of `EIGHT_DEVICES` are tests like any others, in one child of eight devices; `two_processes.py` is a program of two.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import children
from tests.core.fakes import on_thread
from xferlib.stager import Stager

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
EIGHT_DEVICES = HERE / "eight_devices.py", HERE / "eight_devices_stagers.py"
SECONDS = 300


def test_all_that_holds_on_eight_devices(stager: Stager) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, EIGHT_DEVICES)]
    child = children.run(command, seconds=SECONDS, cwd=ROOT, env=os.environ | EIGHT)
    assert child.returncode == 0, child.stdout + child.stderr


def test_two_processes_make_one_global_array(stager: Stager) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment = os.environ | EIGHT | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", str(HERE / "two_processes.py"), str(port), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, "\n".join(outputs)
        assert "all right" in output


@pytest.mark.usefixtures("stager")
def test_a_forked_child_begins_with_no_stagers_of_loops_though_a_thread_of_its_parent_is_at_them() -> None:
    from xferlib_jax import _stagers

    shared = _stagers._Shared()
    shared._rows[7] = _stagers._Row(keeps=False)
    with shared._lock:
        # It is reentrant: the child is another thread.
        pid = on_thread(lambda: _forked(lambda: shared._lock.acquire(blocking=False) and not shared._rows)).result(SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _forked(holds: Callable[[], bool]) -> int:
    pid = children.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if holds() else 1
        finally:
            os._exit(code)
    return pid


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="Flax is not installed")
def test_what_flax_would_have_given_comes_out(stager: Stager) -> None:
    program = (
        "import jax, numpy as np, xferlib_jax\n"
        "from flax import jax_utils\n"
        "batches = [{'x': np.random.rand(8, 5, 3).astype('f4'), 'y': np.full((8, 2), i, 'i4')} for i in range(5)]\n"
        "for devices in (None, jax.devices()[::-1]):\n"
        "    theirs = list(jax_utils.prefetch_to_device(iter(batches), 2, devices))\n"
        "    with xferlib_jax.prefetch_to_device(iter(batches), 2, devices) as found:\n"
        "        ours = list(found)\n"
        "    assert len(ours) == len(theirs) == 5\n"
        "    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):\n"
        "        assert a.shape == b.shape and a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)\n"
        "        assert all((p.data == q.data).all() and p.device == q.device\n"
        "                   for p, q in zip(a.addressable_shards, b.addressable_shards, strict=True))\n"
    )
    child = children.run([sys.executable, "-c", program], seconds=SECONDS, env=os.environ | EIGHT)
    assert child.returncode == 0, child.stderr


def test_its_names_come_without_jax_until_they_are_asked_for() -> None:
    program = (
        "import sys\n"
        "sys.modules['jax'] = None\n"
        "import xferlib, xferlib_jax\n"
        "assert not hasattr(xferlib_jax, 'prefetch_to_nowhere')\n"
        "try:\n"
        "    xferlib_jax.prefetch\n"
        "except xferlib.BackendUnavailableError as error:\n"
        "    assert 'pip install' in str(error)\n"
        "else:\n"
        "    raise AssertionError('it was found')\n"
    )
    child = children.run([sys.executable, "-c", program], seconds=SECONDS)
    assert child.returncode == 0, child.stderr
