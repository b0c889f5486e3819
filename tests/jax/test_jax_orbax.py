"""Orbax keeps the steps, xferlib writes the files: saved beside training that donates, restored, and refused where Orbax would."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG
from xferlib.stager import Stager

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed: its handler was not tried")

SUFFIX = ".orbax-checkpoint-tmp"


def state(value: float) -> dict[str, Any]:
    return {"w": [jax.numpy.full((40, 30), value), jax.numpy.full((7,), value, "bfloat16")], "step": int(value), "name": "a run"}


def manager(folder: Path, stager: Stager, **options: Any) -> Any:
    from xferlib_jax.orbax import XferHandler

    return ocp.CheckpointManager(
        folder, item_handlers=XferHandler(stager, **options), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def equal(got: Any, value: float) -> None:
    assert (got["step"], got["name"]) == (int(value), "a run")
    for leaf, want in zip(got["w"], state(value)["w"], strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert np.asarray(leaf).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("snapshot", [False, True])
def test_steps_are_saved_kept_and_restored_while_training_donates(stager: Stager, tmp_path: Path, snapshot: bool) -> None:
    from xferlib_jax.orbax import XferRestore, XferSave

    step = jax.jit(lambda w: [value + 1 for value in w], donate_argnums=0)
    now = state(0)
    with manager(tmp_path, stager, snapshot=snapshot, memory=64 << 10) as kept:
        for number in range(1, 5):
            now = {**now, "w": step(now["w"]), "step": number}
            kept.save(number, args=XferSave(now))
        # Its memory goes to the next state at once.
        step(now["w"])
        kept.wait_until_finished()
        assert kept.all_steps() == [3, 4]
        equal(kept.restore(4, args=XferRestore(like=state(0))), 4)
        equal(kept.restore(3, args=XferRestore(like=state(0))), 3)
    # Another process would find it so.
    with manager(tmp_path, stager) as again:
        assert again.latest_step() == 4
        equal(again.restore(4, args=XferRestore(like=state(0))), 4)
        alone = again.restore(4, args=XferRestore())
        assert sorted(alone) == ["w.0", "w.1"]
    (file,) = (tmp_path / "4").rglob("*.safetensors")
    assert sorted(xferlib.load(file, stager)) == ["w.0", "w.1"]


def test_a_step_has_its_name_when_the_file_is_there(stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax.orbax import XferSave

    sync, written, gate = os.fsync, threading.Event(), threading.Event()

    def held(descriptor: int) -> None:
        written.set()
        assert gate.wait(WATCHDOG)
        sync(descriptor)

    with manager(tmp_path, stager, snapshot=True) as kept:
        monkeypatch.setattr(os, "fsync", held)
        kept.save(1, args=XferSave(state(1)))
        assert written.wait(WATCHDOG)
        assert not (tmp_path / "1").exists()
        gate.set()
        kept.wait_until_finished()
        assert (tmp_path / "1").exists()


def test_the_folder_that_a_killed_process_left_of_a_step_is_not_written_to(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import xferlib_jax.orbax
    from xferlib_jax.orbax import XferRestore, XferSave

    waits, remove, save, sleep = threading.Event(), shutil.rmtree, xferlib.save, asyncio.sleep
    left: list[bool] = []

    def remove_late(*args: Any, **options: Any) -> None:
        # Orbax removes what is left when it makes the folder anew, on a thread of its own.
        assert waits.wait(WATCHDOG)
        remove(*args, **options)

    def note(path: Path, *args: Any, **options: Any) -> Any:
        left.append((path.parent / "half").exists())
        waits.set()
        return save(path, *args, **options)

    async def wait(seconds: float) -> None:
        waits.set()
        await sleep(seconds)

    with manager(tmp_path, stager) as kept:
        kept.save(1, args=XferSave(state(1)))
        kept.wait_until_finished()
        (item,) = [path.name for path in (tmp_path / "1").iterdir() if path.is_dir()]
        half = tmp_path / f"2{SUFFIX}" / f"{item}{SUFFIX}"
        half.mkdir(parents=True)
        (half / "half").write_bytes(b"half")
        monkeypatch.setattr(shutil, "rmtree", remove_late)
        monkeypatch.setattr(xferlib, "save", note)
        monkeypatch.setattr(xferlib_jax.orbax, "asyncio", SimpleNamespace(sleep=wait))
        kept.save(2, args=XferSave(state(2)))
        kept.wait_until_finished()
        assert left == [False]
        equal(kept.restore(2, args=XferRestore(like=state(0))), 2)


def test_what_cannot_be_saved_is_refused_at_the_call(stager: Stager, tmp_path: Path) -> None:
    from xferlib_jax.orbax import XferSave

    with manager(tmp_path, stager) as kept:
        with pytest.raises(TypeError, match=r"expected a device array, got builtins\.object"):
            kept.save(1, args=XferSave({"w": jax.numpy.zeros(3), "o": object()}))
        assert kept.all_steps() == []


def test_a_checkpointer_that_waits_saves_as_well(stager: Stager, tmp_path: Path) -> None:
    from xferlib_jax.orbax import XferHandler, XferRestore, XferSave

    with ocp.Checkpointer(XferHandler(stager)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=XferSave(state(3)))
        equal(checkpointer.restore(tmp_path / "one", args=XferRestore(like=state(0))), 3)
