"""One pass over tasks: who fills what, in which order the batches come out, what becomes of a task whose worker died.

Invariant: every task that was taken is, at any time, with a worker, waiting to be tried again, or answered; each answer comes out
once, at its place.
"""

from __future__ import annotations

import gc
import pickle
import reprlib
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

from xferlib.callers import user_line
from xferlib.checks import uncopied
from xferlib.errors import ClosedError, WorkerDiedError, WorkerError, add_note, anew
from xferlib.ledger import reap_all
from xferlib.pipeline.one_pass import OnePass, steps
from xferlib.pipeline.workers.layout import SlotTree
from xferlib.pipeline.workers.messages import Begin, Filled, Raised, Task
from xferlib.pipeline.workers.pool import Exit, WorkerPool
from xferlib.pipeline.workers.process import Answer
from xferlib.pipeline.workers.slots import Slots
from xferlib.typed import TreeT_co
from xferlib.words import counted

__all__ = ["OnDeath", "Run", "WorkerTraceback"]

OnDeath: TypeAlias = Literal["replace", "raise"]

NO_SLOT = -1
FIRST_NAP_SECONDS = 100e-6
LONGEST_NAP_SECONDS = 2e-3
STUCK_SECONDS = 10.0
"""Seconds without a slot, while the consumer holds all, before it is told so."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker: the traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class _InSlot(NamedTuple):
    """A batch that is filled and not given out yet."""

    slot: int
    tree: SlotTree | None


class _Step(NamedTuple):
    """What `__next__` is to do after a step: raise the error, say the warning and go on, or return the tree.

    An error is handed out like this, because what a step itself raises is an interrupt.
    """

    tree: Any = None
    error: Exception | None = None
    warning: str = ""


@final
class Run(OnePass, Iterator[TreeT_co]):
    """The batches of one pass. Iterate on one thread; `close()` works on any.

    After an exception the iteration may go on: the batch of that task is the only one lost.
    """

    rewrites = False
    """A slot is written again only when nothing reads it: see `prefetch`."""

    __reduce_ex__ = uncopied("Begin another with SharedRing.run(...)")

    def __init__(
        self,
        owner: object,
        pool: WorkerPool,
        slots: Slots,
        begin: Begin,
        tasks: Iterator[Any],
        *,
        workers: int,
        length: int | None,
        ordered: bool,
        on_death: OnDeath,
        retries: int,
    ) -> None:
        # What iterates it may be a thread that runs only our code, such as that of a prefetch.
        self._begun_at = user_line()
        self._owner = owner
        self._pool = pool
        self._slots = slots
        self._begin = begin
        self._tasks = tasks
        self._workers = workers
        self._length = length
        self._ordered = ordered
        self._retries = retries if on_death == "replace" else 0
        self._ended: Exception | None = None
        self._begun = self._exhausted = False
        self._taken = self._given = 0
        self._task: Task | None = None
        """The next, which has no slot yet."""
        self._again: list[Task] = []
        self._tries: dict[int, int] = {}
        self._outcomes: dict[int, _InSlot | Exception] = {}
        self._unsaid: list[str] = []
        self._starved = False
        self._starved_since = 0.0
        self._nap = FIRST_NAP_SECONDS

    def __iter__(self) -> Iterator[TreeT_co]:
        """Begin the pass, or go on with it. Raises `ClosedError` where there is nothing to go on with."""
        if isinstance(self._ended, StopIteration):
            raise ClosedError(
                "this run has ended: it goes over its tasks once. Call run(...) of the ring for each epoch, inside the loop over "
                "epochs"
            )
        return steps(self)

    def __next__(self) -> TreeT_co:
        while True:
            step = self._step()
            try:
                if step.error is not None:
                    raise step.error
                if not step.warning:
                    return cast("TreeT_co", step.tree)
                self._begun_at.warn(step.warning)
            finally:
                # The traceback of an error leads to this frame: of what is raised here, and of a task that came while this ran.
                del step

    def _step(self) -> _Step:
        if self._pool.reentered:
            return _Step(error=RuntimeError("the tasks of a run, or a finalizer inside a step of it, ask it for a batch"))
        with self._pool.lock:
            if self._pool.torn:
                self._mend()
            if self._ended is not None:
                return _Step(error=anew(self._ended))
            self._pool.torn = True
            try:
                step = self._advance()
            except BaseException:
                # An interrupt. If another one comes in here, the next step finds the pool torn.
                self._mend()
                raise
            self._pool.torn = False
            try:
                return step
            finally:
                # See `__next__`.
                del step

    def _mend(self) -> None:
        """Bring things in order after an interrupt of a step, of this run or of one before it."""
        self._pool.mend()
        if self._begun:
            self.end(RuntimeError("this run was interrupted, and batches of it are lost. Begin another run"))
        self._pool.torn = False

    def close(self) -> None:
        """End the iteration. Workers finish what they are filling; nobody will see it. Twice is fine."""
        self.end(StopIteration())

    def end(self, reason: Exception) -> None:
        """End the iteration; every further step raises this, if it had not ended before. Wakes nobody."""
        if self._ended is None:
            self._ended = reason

    def __repr__(self) -> str:
        total = "" if self._length is None else f" of {self._length}"
        state = "ended" if self._ended is not None else counted(self._workers, "worker")
        return f"<Run, {self._given}{total} taken, {state}>"

    def _advance(self) -> _Step:
        if not self._begun:
            self._slots.keep_only(self._pool.taken())
            self._begun = True
        while True:
            if self._ended is not None:
                return _Step(error=anew(self._ended))
            if self._unsaid:
                return _Step(warning=self._unsaid.pop(0))
            try:
                self._pool.start_up_to(self._workers)
            except WorkerDiedError as error:
                self.close()
                return _Step(error=error)
            except Exception as error:
                # The system has no further process now.
                return _Step(error=error)
            self._pool.flush()
            self._deal()
            number = self._next_answered()
            if number is not None:
                return self._given_out(self._outcomes.pop(number))
            if self._exhausted and self._given == self._taken:
                self.close()
                continue
            self._listen()

    def _deal(self) -> None:
        was_starved, self._starved = self._starved, False
        while (worker := self._pool.pick(self._workers)) is not None:
            task = self._next_task()
            if task is None:
                break
            was_starved = False
            worker.assign(self._begin, task)
        if self._starved and not was_starved:
            self._nap = FIRST_NAP_SECONDS
            self._starved_since = time.monotonic()

    def _next_task(self) -> Task | None:
        if self._again:
            return self._again.pop(0)
        # Before the slot: otherwise a consumer that holds every slot would never hear that there are no more tasks.
        if self._task is None:
            self._task = self._pull()
        if self._task is None:
            return None
        slot = self._slots.take()
        if slot is None:
            # A copy may be done that nobody has asked about since.
            reap_all()
            slot = self._slots.take()
        if slot is None:
            self._starved = True
            return None
        task, self._task = self._task._replace(slot=slot), None
        return task

    def _pull(self) -> Task | None:
        """Take the next task, to be given a slot; None if there is none. Tasks that cannot be had or sent are answered at once."""
        while not self._exhausted:
            try:
                given = next(self._tasks)
            except StopIteration:
                self._exhausted = True
                return None
            except Exception as error:
                self._exhausted = True
                self._outcomes[self._taken] = error
                self._taken += 1
                return None
            number = self._taken
            self._taken += 1
            try:
                data = pickle.dumps(given, pickle.HIGHEST_PROTOCOL)
                return Task(self._begin.run, number, NO_SLOT, data, f"{number} ({reprlib.repr(given)})")
            except Exception as error:
                add_note(error, f"task {number} could not be sent to a worker")
                self._outcomes[number] = error
        return None

    def _next_answered(self) -> int | None:
        if not self._ordered:
            return next(iter(self._outcomes), None)
        return self._given if self._given in self._outcomes else None

    def _given_out(self, outcome: _InSlot | Exception) -> _Step:
        self._given += 1
        if isinstance(outcome, _InSlot):
            return _Step(tree=self._slots.lease(*outcome))
        if isinstance(outcome, StopIteration):
            # By itself it would look like the end.
            outcome = _error_of(outcome)
        return _Step(error=outcome)

    def _listen(self) -> None:
        timeout = self._timeout()
        if timeout is not None and self._slots.all_held:
            # No worker has anything to fill, and so nothing to say.
            self._slots.wait(timeout)
            timeout = 0.0
        for heard in self._pool.listen(timeout):
            if isinstance(heard, Answer):
                self._answered(heard)
            else:
                self._exited(heard)

    def _timeout(self) -> float | None:
        """Return how long to listen: until somebody speaks; but while there is no slot, only until a copy may be done."""
        if not self._starved:
            return None
        nap, self._nap = self._nap, min(2 * self._nap, LONGEST_NAP_SECONDS)
        if self._slots.all_held and time.monotonic() - self._starved_since > STUCK_SECONDS:
            self._starved_since = float("inf")
            gc.collect()
            if self._slots.all_held:
                self._unsaid.append(
                    f"no worker can go on: the consumer, or copies under way, have held every slot for {STUCK_SECONDS:.0f} "
                    "seconds. Let go of batches, or give the ring more slots"
                )
        return nap

    def _answered(self, answer: Answer) -> None:
        task, reply = answer
        if task.run != self._begin.run:
            self._slots.give_back(task.slot)
        elif isinstance(reply, Filled):
            self._filled(task, reply.tree)
        elif isinstance(reply, Raised):
            self._slots.give_back(task.slot)
            self._outcomes[task.number] = _error(reply, task.words)

    def _filled(self, task: Task, tree: bytes | None) -> None:
        try:
            self._outcomes[task.number] = _InSlot(task.slot, None if tree is None else pickle.loads(tree))
        except Exception as error:
            self._slots.give_back(task.slot)
            add_note(error, f"what fill gave beside its arrays could not be made here, for task {task.words}")
            self._outcomes[task.number] = error

    def _exited(self, ended: Exit) -> None:
        lost = ended.lost
        if lost is not None and lost.run != self._begin.run:
            self._slots.give_back(lost.slot)
            lost = None
        for task in ended.waiting:
            if task.run == self._begin.run:
                self._again.append(task)
            else:
                self._slots.give_back(task.slot)
        if lost is None:
            self._unsaid.append(f"{ended.words} while it had nothing to fill. Another takes its place")
        else:
            self._lose(lost, ended.words)
        self._again.sort(key=lambda task: task.number)

    def _lose(self, lost: Task, words: str) -> None:
        tries = self._tries[lost.number] = self._tries.get(lost.number, 0) + 1
        if tries <= self._retries:
            self._again.append(lost)
            self._unsaid.append(f"{words} while it filled a slot for task {lost.words}. Another worker tries again")
            return
        self._slots.give_back(lost.slot)
        times = f", with {tries - 1} tries before" if tries > 1 else ""
        self._outcomes[lost.number] = WorkerDiedError(f"{words} while it filled a slot for task {lost.words}{times}")


def _error_of(stop: StopIteration) -> RuntimeError:
    error = RuntimeError("StopIteration was raised where a task is pickled, or what fill gave is unpickled")
    error.__cause__ = stop
    return error


def _error(raised: Raised, task: str) -> Exception:
    made: object = None
    if raised.error is not None:
        with suppress(Exception):
            made = pickle.loads(raised.error)
    # It could be made in the worker, and perhaps not here.
    error = made if isinstance(made, Exception) else WorkerError(f"fill raised {raised.words}")
    add_note(error, f"raised by fill in a worker, for task {task}")
    # Not by an assignment, which the error of a frozen dataclass refuses.
    _CAUSE.__set__(error, WorkerTraceback(raised.traceback))
    return error


_CAUSE: Any = BaseException.__dict__["__cause__"]
