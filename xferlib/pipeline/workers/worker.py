"""What runs in a worker process: map the memory, fill slots, say so.

It opens no stager and loads no framework; what `fill` itself imports is the user's. It ends when the parent does, whatever it is
doing then.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import reprlib
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, final

import numpy as np

from xferlib.errors import add_note
from xferlib.pipeline.workers.channel import receive, send
from xferlib.pipeline.workers.layout import Bytes, SlotTree, marked
from xferlib.pipeline.workers.memory import Descriptor, map_shared
from xferlib.pipeline.workers.messages import Begin, Filled, Raised, Ready, Reply, Task
from xferlib.pipeline.workers.process import watch
from xferlib.tree import PLAIN, path, rides_along

__all__ = ["serve"]

LONGEST_TEXT = 16_000
"""Characters of a traceback that people read."""
MOVED = "fill has renamed or taken out an array of its slot. Leave them where they are, and write into them"


def serve(parent: int, descriptor: Descriptor, whole: SlotTree, nbytes: int, slots: int, connection: socket.socket) -> None:
    """Fill slots until the parent hangs up. `whole`: the full batch; `nbytes`: of each slot."""
    # The parent is told of Ctrl-C as well, and decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with(parent)
    raw = map_shared(descriptor, slots * nbytes)
    descriptor.close()
    filler = _Filler(whole, [raw[start : start + nbytes] for start in range(0, slots * nbytes, nbytes)])
    try:
        send(connection, Ready())
        while True:
            message = receive(connection)
            if isinstance(message, Begin):
                filler.begin(message.fill)
            else:
                send(connection, filler.reply(message))
    except (EOFError, ConnectionError):
        return


FILL_ADVICE = (
    "a worker process could not import fill. Define it at the top of a module, not inside of a function or of "
    '`if __name__ == "__main__":`, which only the program itself runs'
)


@final
class _Filler:
    """The function of the present run, and the slots."""

    def __init__(self, whole: SlotTree, slots: list[Bytes]) -> None:
        self._whole = whole
        self._slots = slots
        self._fill: Callable[[Any, Any], Any] = _nothing
        self._broken: Raised | None = None

    def begin(self, fill: bytes) -> None:
        self._broken = None
        try:
            self._fill = pickle.loads(fill)
        except Exception as error:
            add_note(error, FILL_ADVICE)
            self._broken = _raised(error)

    def reply(self, task: Task) -> Reply:
        if self._broken is not None:
            return self._broken
        slot = self._slots[task.slot]
        try:
            given = pickle.loads(task.data)
            views = self._whole.views(slot)
            before = PLAIN.flatten(views)
            value = self._fill(given, views)
            tree = self._whole.returned(value, slot)
            if value is None or isinstance(value, (int, np.integer)):
                beside = _put_beside(views, *before)
                if beside is not None:
                    tree = (tree or self._whole)._replace(tree=beside)
            else:
                _check_nothing_left(views, value)
            return Filled(None if tree is None else _sent(tree))
        except BaseException as error:
            return _raised(error)


def _put_beside(views: Any, arrays: list[Any], structure: Any) -> Any | None:
    """Return the tree of `SlotTree` with what `fill` has put beside the arrays of its slot; None if there is nothing.

    Raises `TypeError` where it has put something in place of an array: the memory would keep an older batch.
    """
    leaves, found = PLAIN.flatten(views)
    places = [index for index, leaf in enumerate(leaves) if not rides_along(type(leaf))]
    if len(places) < len(arrays):
        raise TypeError(MOVED)
    for number, index in enumerate(places):
        if number >= len(arrays) or leaves[index] is not arrays[number]:
            raise TypeError(
                f"fill has put {reprlib.repr(leaves[index])} into its slot ({path(found, index)}): only what is written into the "
                "arrays that are there arrives. Write slot[key][...] = values. Beside them go text, numbers and xferlib.Host(array)"
            )
    if found == structure:
        return None
    paths = [] if found is None else found.paths()
    if structure is None or [paths[index] for index in places] != structure.paths():
        raise TypeError(MOVED)
    return marked(leaves, found)


def _check_nothing_left(views: Any, value: Any) -> None:
    """Raise `TypeError` where `fill` has put something beside the arrays of its slot, and returned a tree that lacks it."""
    leaves, found = PLAIN.flatten(views)
    _, structure = PLAIN.flatten(value)
    returned = [] if structure is None else structure.paths()
    for index, leaf in enumerate(leaves):
        if found is not None and rides_along(type(leaf)) and found.paths()[index] not in returned:
            raise TypeError(
                f"fill has put {reprlib.repr(leaf)} into its slot ({path(found, index)}), and returned a tree without it. Put it "
                "there, or return None or a number of rows"
            )


def _sent(tree: SlotTree) -> bytes:
    try:
        return pickle.dumps(tree, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        add_note(error, "what fill gives beside its arrays could not be sent to the process that has the ring")
        raise


def _nothing(task: Any, slot: Any) -> NoReturn:
    raise AssertionError("a task came before its run began")


def _raised(error: BaseException) -> Raised:
    if error.__traceback__ is not None:
        # Without the frame of this file.
        BaseException.with_traceback(error, error.__traceback__.tb_next)
    text = "".join(traceback.format_exception(error))
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT // 2]}\n...\n{text[-LONGEST_TEXT // 2 :]}"
    words = "".join(traceback.format_exception_only(error)).strip()
    return Raised(_portable(error), words[:LONGEST_TEXT], text)


def _portable(error: BaseException) -> bytes | None:
    """Pickle an exception that can be raised in the parent as itself."""
    # If an iterator raised a stop, that would look like its end.
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        return None
    try:
        data = pickle.dumps(error)
        return data if len(data) <= LONGEST_TEXT and type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def _end_with(parent: int) -> None:
    """End this process as soon as the parent has ended.

    Not by `PR_SET_PDEATHSIG`: that comes when the parent's *thread* that started the worker ends.
    """
    process = multiprocessing.parent_process()
    assert process is not None
    try:
        watched = watch(parent, process.sentinel)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(watched,), name="xferlib-parent", daemon=True).start()


def _watch(parent: int) -> None:
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    while not ended.poll():
        pass
    os._exit(1)
