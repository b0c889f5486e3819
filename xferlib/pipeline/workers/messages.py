"""What is said between the parent and a worker."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["Begin", "Filled", "Order", "Raised", "Ready", "Reply"]


class Begin(NamedTuple):
    """To the worker: orders of this run are filled by this function, pickled."""

    run: int
    fill: bytes


class Order(NamedTuple):
    """To the worker: fill this slot for this task, pickled. `words`: the task for people, which the parent remembers with it."""

    run: int
    number: int
    slot: int
    task: bytes
    words: str


class Ready(NamedTuple):
    """From the worker, once: it has started."""


class Filled(NamedTuple):
    """From the worker: its oldest order is done. `parts`: its `SlotTree`, pickled; None: all of the slot.

    They may have objects of the user's, which fail to be made here without harm to other messages.
    """

    parts: bytes | None


class Raised(NamedTuple):
    """From the worker: its oldest order raised. `error` is the exception, pickled, where it can be raised elsewhere as itself."""

    error: bytes | None
    words: str
    traceback: str


Reply: TypeAlias = Ready | Filled | Raised
