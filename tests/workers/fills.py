"""What the workers of these tests run, and what holds them. Imported in spawned processes, so it stays small.

A gate is a directory with two pipes that have names: a worker says there who it is, and waits there to be let go.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import xferlib


class Gate(NamedTuple):
    """Holds a worker inside `fill`. Both ends wait for each other, so no moment is left to luck."""

    place: Path

    def make(self) -> Gate:
        """Make its pipes."""
        self.place.mkdir()
        os.mkfifo(self.place / "pid")
        os.mkfifo(self.place / "go")
        return self

    def arrived(self) -> int:
        """Wait for a worker to come, and return its process id."""
        return int((self.place / "pid").read_text())

    def open(self) -> None:
        """Let the worker that came go on."""
        (self.place / "go").write_text("go")

    def stand(self) -> None:
        """In the worker: say that it is there and wait to be let go."""
        (self.place / "pid").write_text(str(os.getpid()))
        (self.place / "go").read_text()


class OwnError(Exception):
    """An exception that travels."""


class StubbornError(Exception):
    """An exception that cannot be made from its own arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class DisguisedError(Exception):
    """An exception of which something else comes out of its pickle."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return str, ("a text",)


class FarError(Exception):
    """An exception that can be made in its own process alone: elsewhere something else comes out."""

    def __reduce__(self) -> tuple[Any, tuple[int, str]]:
        return _at_home, (os.getpid(), str(self))


def _at_home(process: int, words: str) -> Any:
    return FarError(words) if os.getpid() == process else words


class FrozenError(Exception):
    """An exception of which no attribute can be set, as those of frozen dataclasses, and which takes no notes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is frozen")


@dataclass
class Batch:
    """A batch of a class of its own, which a worker meets for the first time in what it is sent."""

    image: Any
    label: Any


def batch(task: int, slot: Batch) -> None:
    """Write the task everywhere."""
    slot.image[...] = slot.label[...] = task


def number(task: int, slot: Any) -> None:
    """Write the task everywhere."""
    slot[...] = task


def whose(task: int, slot: Any) -> None:
    """Write which process this is everywhere."""
    slot[...] = os.getpid()


def slowly(task: int, slot: Any) -> None:
    """Write the task row by row, so that a worker is killed between two of them."""
    for row in slot:
        row[...] = task


def behind(task: int | tuple[int, Gate], slot: Any) -> None:
    """Write the task's number; where it has a gate, after that has opened, and half before."""
    if isinstance(task, int):
        slot[...] = task
        return
    value, gate = task
    slot[: len(slot) // 2] = value
    gate.stand()
    slot[...] = value


class Trip(NamedTuple):
    """What befalls a worker between two rows: it raises, or dies; of those that come by the first one only, which leaves its id."""

    row: int
    grave: str | None = None

    def fall(self) -> None:
        """In the worker: raise, die, or go on where another has died."""
        if self.grave is None:
            raise OwnError("something", 7)
        with suppress(FileExistsError):
            # There and complete in one step.
            os.symlink(str(os.getpid()), self.grave)
            os.kill(os.getpid(), signal.SIGKILL)


class Stamp(NamedTuple):
    """A task of which every byte of its batch tells: which run it belongs to, which task it is, and where in the batch it lies."""

    run: int
    number: int
    rows: int
    trip: Trip | None = None

    @property
    def batch(self) -> dict[str, npt.NDArray[np.uint64]]:
        """The batch that must come of it."""
        return stamped(self.run, self.number, self.rows)


STAMPED = {"image": ((32, 256), np.uint64), "label": ((32,), np.uint64)}
"""The spec of a ring for such tasks; a batch is large enough for a transfer that is not packed."""


def stamped(run: int, number: int, rows: int) -> dict[str, npt.NDArray[np.uint64]]:
    """Return the batch of a task: no other task has a word of it in the same place."""
    word = np.uint64(run << 32 | number)
    image = np.arange(rows * 256, dtype=np.uint64).reshape(rows, 256) * np.uint64(0x9E3779B97F4A7C15)
    return {"image": image + word, "label": np.full(rows, word)}


def stamp(task: Stamp, slot: Any) -> int:
    """Write the batch of a task row by row, as far as its trip lets it."""
    batch = task.batch
    for row in range(task.rows):
        if task.trip is not None and task.trip.row == row:
            task.trip.fall()
        for name, values in batch.items():
            slot[name][row] = values[row]
    return task.rows


class Large(NamedTuple):
    """A task of some size, the reply to which is of another size. Where it has a gate, that is before the reply."""

    number: int
    load: bytes
    reply: int
    gate: Gate | None = None


def large(task: Large, slot: Any) -> Any:
    """Write the task's number everywhere, and return the slot under a name of the size that the task says."""
    slot[...] = task.number
    if task.gate is not None:
        task.gate.stand()
    return {"x" * task.reply: slot}


def rows(task: int, slot: Any) -> int:
    """Fill as many rows as the task says."""
    for leaf in slot.values():
        leaf[:task] = task
    return task


def views(task: int, slot: Any) -> Any:
    """Fill a part, and say which."""
    part = {"label": slot["label"][1:task], "even": slot["image"][::2, :2]}
    part["label"][...] = task
    part["even"][...] = task
    return part


def elsewhere(task: int, slot: Any) -> Any:
    """Return an array that is not in the slot."""
    return slot + task


def fail(task: Any, slot: Any) -> None:
    """Raise what the task says."""
    slot[...] = 1
    if task == "own":
        raise OwnError("something", 7)
    if task == "stubborn":
        raise StubbornError(1, 2)
    if task == "disguised":
        raise DisguisedError("in here")
    if task == "far":
        raise FarError("over there")
    if task == "frozen":
        raise FrozenError("solid")
    if task == "stop":
        raise StopIteration("no more")
    if task == "exit":
        sys.exit("enough")


def die(task: int, slot: Any) -> None:
    """Kill this process if the task is odd."""
    slot[...] = task
    if task % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def die_once(task: str, slot: Any) -> None:
    """Kill this process, unless the file is there that is made before."""
    if not os.path.exists(task):
        Path(task).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    slot[...] = 1


def leave(task: int, slot: Any) -> None:
    """Leave without a word."""
    os._exit(5)


def modules(task: Any, slot: Any) -> int:
    """Fill as many rows as there are modules here that a worker must not have loaded."""
    unwanted = {"cupy", "cuda", "numba", "jax", "jaxlib", "torch", "xferlib_host", "xferlib_cupy", "xferlib_numba", "xferlib_jax"}
    return len(unwanted & set(sys.modules))


class Counter:
    """A fill with something of its own, that counts its calls in this process."""

    def __init__(self, start: int) -> None:
        self.value = start

    def __call__(self, task: Any, slot: Any) -> None:
        slot[...] = self.value
        self.value += 1


class Unloadable:
    """Pickles, and cannot be loaded where the test is not."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return __import__, ("a_module_that_is_nowhere",)

    def __call__(self, task: Any, slot: Any) -> None:
        raise AssertionError


def replaces(task: str, slot: Any) -> int | None:
    """Do what forgets the brackets: `slot[key] = ...`, and not `slot[key][:] = ...`."""
    if task == "second":
        slot["label"] = np.ones(4, np.int64)
    elif task == "array beside":
        slot["name"] = np.ones(3)
    elif task == "text in its place":
        slot["image"] = "a.png"
    elif task == "out":
        del slot["label"]
    elif task == "twice":
        slot["label"] = slot["image"]
    elif task == "swapped":
        slot["image"], slot["label"] = slot["label"], slot["image"]
    elif task == "renamed":
        slot["zlabel"] = slot.pop("label")
    elif task == "rows of another":
        slot["label"] = np.ones(4, np.int64)
        return 2
    else:
        slot["image"][:] = 1
    return 2 if task == "rows" else None


def names(task: tuple[dict[str, Any], int | None], slot: Any) -> int | None:
    """Put what the task has beside the arrays of the slot."""
    beside, rows = task
    slot.update(beside)
    slot["image"][:] = 1
    return rows


def stacks(task: list[Any], slot: Any) -> int:
    """Write the items that the task has, and their number beside them."""
    rows = xferlib.stack(task, slot)
    slot["count"] = rows
    return rows


def numbered(task: int, slot: Any) -> Any:
    """Write the task, and return views with its name beside them."""
    slot["image"][:] = task
    return {"image": slot["image"][:2], "at": (f"{task}.png", task)}


class Fragile(Exception):
    """What it raises."""


class Unmakeable:
    """Goes into a message and comes out of none."""

    def __reduce__(self) -> Any:
        return _refuses, ()


def _refuses() -> Any:
    raise Fragile("not here")


class Stopping:
    """The same, and what it raises looks like an end."""

    def __reduce__(self) -> Any:
        return next, (iter(()),)


def unmakeable(task: int, slot: Any) -> None:
    """Put beside the arrays, for one task, what cannot be made in the parent."""
    slot["image"][:] = task
    if task == 1:
        slot["name"] = xferlib.Host(Unmakeable())


def stopping(task: int, slot: Any) -> None:
    """Do the same."""
    slot["image"][:] = task
    if task == 1:
        slot["name"] = xferlib.Host(Stopping())


def leaves_names(task: str, slot: Any) -> Any:
    """Put the task beside the arrays, and return views without it, or with it."""
    slot["name"] = task
    views = {"image": slot["image"][:2]}
    return views | {"name": "other"} if task == "with" else [views["image"]] if task == "list" else views


def looks_elsewhere(task: Any, slot: Any) -> Any:
    """Return views, whatever became of the tree."""
    image = slot.pop("image")
    image[:] = 5
    return {"image": image[:2]}
