"""What is said between the parent and a worker."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["Begin", "Filled", "Raised", "Ready", "Reply", "Task"]


class Begin(NamedTuple):
    """To the worker: slots are filled for the tasks of this run by this function, pickled."""

    run: int
    fill: bytes


class Task(NamedTuple):
    """To the worker: fill this slot for one of the caller's tasks, pickled in `data`. `words`: that task, for people."""

    run: int
    number: int
    slot: int
    data: bytes
    words: str


class Ready(NamedTuple):
    """From the worker, once: it has started."""


class Filled(NamedTuple):
    """From the worker: the oldest task that it has is done. `tree`: its `SlotTree`, pickled; None: all of the slot.

    It may have objects of the user's, which fail to be made here without harm to other messages.
    """

    tree: bytes | None


class Raised(NamedTuple):
    """From the worker: the oldest task that it has raised. `error`: the exception, pickled, where it can be raised as itself."""

    error: bytes | None
    words: str
    traceback: str


Reply: TypeAlias = Ready | Filled | Raised
