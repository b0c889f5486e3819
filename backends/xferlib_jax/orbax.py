"""Orbax's checkpoints with files of xferlib's: Orbax keeps the steps and their folders, `xferlib.save` writes the arrays.

    with ocp.CheckpointManager(folder, item_handlers=XferHandler(stager)) as manager:
        manager.save(step, args=XferSave(state))
        state = manager.restore(step, args=XferRestore(like=state))

States on one device; each becomes one `.safetensors` file, which others read as well. Orbax's own handlers write arrays that are
spread over several devices. Needs the package orbax-checkpoint, and is imported by name alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any, final

import orbax.checkpoint as ocp

import xferlib

__all__ = ["XferHandler", "XferRestore", "XferSave"]

FILE = "state.safetensors"
FOLDER_SECONDS = 60
"""How long Orbax may take to make the folder of a step: it does so beside the call."""
LOOK_SECONDS = 0.001


@final
class XferHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # Orbax need not be there when types are checked.
    """Saves trees of JAX arrays, with the text and numbers among them, by a stager that the caller opened, and closes afterwards.

    `snapshot`, `memory` and `rate_limit` are those of `xferlib.save`. The call returns when the arrays may be donated: when they
    have been read, or at once for a snapshot.
    """

    def __init__(
        self, stager: xferlib.Stager, *, snapshot: bool = False, memory: int | None = None, rate_limit: float | None = None
    ) -> None:
        self._stager = stager
        limits: dict[str, Any] = {"memory": memory, "rate_limit": rate_limit}
        self._options = {"snapshot": snapshot, **{name: limit for name, limit in limits.items() if limit is not None}}

    async def async_save(self, directory: Any, args: XferSave) -> list[_Written]:
        """Start writing, and return when the arrays may be donated. Raises as `xferlib.save`, `TimeoutError` without a folder."""
        made = threading.Event()

        async def note() -> None:
            made.set()

        # Not by a look at the folder: it may be one that a killed process left, which Orbax is about to remove.
        ocp.future.CommitFutureAwaitingContractedSignals(note(), name="xferlib-orbax", timeout_secs=FOLDER_SECONDS)
        deadline = time.monotonic() + FOLDER_SECONDS
        while not made.is_set():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Orbax has not made {str(directory)!r} after {FOLDER_SECONDS} seconds")
            await asyncio.sleep(LOOK_SECONDS)
        save = xferlib.save(Path(directory) / FILE, args.item, self._stager, **self._options)
        save.wait_read()
        return [_Written(save)]

    def save(self, directory: Any, args: XferSave) -> None:
        """Write, and return when the file is there."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        xferlib.save(Path(directory) / FILE, args.item, self._stager, **self._options).result()

    def restore(self, directory: Any, args: XferRestore | None = None) -> Any:
        """Return what was saved, on the device: like a tree, or without one a dict of arrays by name. Raises as `xferlib.load`."""
        return xferlib.load(Path(directory) / FILE, self._stager, like=None if args is None else args.like)


@final
class _Written:
    """What Orbax waits for before it gives the folder of a step its name."""

    def __init__(self, save: xferlib.Save) -> None:
        self._save = save

    def result(self, timeout: float | None = None) -> None:
        self._save.result(timeout)


@ocp.args.register_with_handler(XferHandler, for_save=True)
@dataclasses.dataclass
class XferSave(ocp.args.CheckpointArgs):  # type: ignore[misc]  # As above.
    """What to save: a tree of arrays, text and numbers, as `xferlib.save` takes it."""

    item: Any


@ocp.args.register_with_handler(XferHandler, for_restore=True)
@dataclasses.dataclass
class XferRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]  # As above.
    """What to load: `like` as `xferlib.load` takes it. It comes back with what the file holds."""

    like: Any = None
