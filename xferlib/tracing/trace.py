"""What users hold: a block in which everything is recorded, and what can be made of it afterwards."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from types import TracebackType
from typing import Final, final

from xferlib.errors import XferError
from xferlib.tracing import chrome, page, picture
from xferlib.tracing.collection import uncollected
from xferlib.tracing.events import HOST, Recording
from xferlib.tracing.gpu import Gpus, has_gpu
from xferlib.tracing.log import LOG
from xferlib.tracing.summary import Summary, summarize
from xferlib.tracing.termination import Termination
from xferlib.uninterrupted import uninterrupted

__all__ = ["Trace", "trace"]

DROPPED: Final = object()
EXIT_SECONDS = 10.0
"""How long the program's end waits for a thread that ends the trace. More than CUPTI takes; nothing is sure of a thread."""
LOOK_SECONDS = 0.001
NO_GPU: Final = (
    "no GPU was recorded, and of the CPU only what stagers of xferlib copy and what runs on streams of their backends: not what "
    "NumPy or a framework does by itself. Bring the arrays by a stager, or trace on a machine with an NVIDIA GPU"
)
NO_COMPUTE: Final = (
    "no GPU was recorded, and of compute on the CPU only what runs on streams of backends: not what NumPy or a framework does by "
    "itself. So nothing is known of overlap: trace on a machine with an NVIDIA GPU"
)
IDLE_GPU: Final = (
    "no work of this process ended on a GPU meanwhile. Begin the trace before the work, wait for the device before the end of the "
    "block, and trace the process that uses the GPU: its children are not in it"
)
"""Why a trace is empty, or has no compute, and what to do."""
_running: dict[None, Trace] = {}
# What runs in the parent of a forked child does not run there.
os.register_at_fork(after_in_child=_running.clear)


def trace(path: str | os.PathLike[str] | None = None, *, gpu: bool | None = None) -> Trace:
    """Record copies and compute of the whole process: `with xferlib.trace("run.json") as t: ...`.

    On a machine with an NVIDIA GPU, CUPTI records all that the GPUs of the process do, whoever asked for it, and where the program
    asked for the copies. What backends without a GPU do is recorded by themselves. At the end of the block the events are written
    to `path`, in the JSON that Perfetto opens; None: nothing is written, so keep the trace by a name. Then `summary`, `html` and
    `png` say and show what was recorded.

    `gpu`: whether GPUs are recorded; None: if there is one. One trace at a time. CUPTI serves one tool in a process, so this does
    not go together with a profiler. What a device has not finished at the end of the block is not in the trace: wait for it before.
    A trace holds some 300 bytes for each event until it is dropped. A process that is forked meanwhile is not traced.

    If the block raises, what was recorded is written all the same; if it cannot be, the block's error says so in a note. With a
    `path`, and on the main thread, SIGTERM ends the block as `sys.exit(143)` would, so that the file is written, unless the program
    has a handler of its own.

    Raises `XferError`, before the block is entered, if another trace runs, another tool has CUPTI, CUPTI is not installed or not
    known, or `gpu` is true and there is none; `FileNotFoundError` if the folder of `path` is not there,
    `IsADirectoryError` if `path` is one.
    """
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"path={path!r}: expected the path of a file for the events, or none at all")
    return Trace(None if path is None else Path(path), gpu)


@final
class Trace:
    """A recording, under way or over. A context manager, to be entered once; any thread may read it when the block has ended."""

    def __init__(self, path: Path | None, gpu: bool | None) -> None:
        # The program may change the folder.
        self._path = None if path is None else path.absolute()
        self._gpu = gpu
        self._gpus: Gpus | None = None
        self._process = os.getpid()
        self._start = 0
        self._begun = False
        self._left = False
        self._termination = Termination()
        self._fate: dict[None, object] = {}
        """Who has begun to end it, or `DROPPED`: nobody will. Who comes first says it, in one step."""
        self._given_back: dict[None, object] = {}
        """Who abandons what was left at its begin, in the same way."""
        self._recording: Recording | None = None

    def __enter__(self) -> Trace:
        if self._start:
            raise XferError("this trace was used already. Make another one with xferlib.trace(...)")
        if self._path is not None and not self._path.parent.is_dir():
            raise FileNotFoundError(f"the folder of {str(self._path)!r} is not there. Make it first, or choose another path")
        if self._path is not None and self._path.is_dir():
            # Now: at the end of the block the recording would be lost.
            raise IsADirectoryError(
                f"{str(self._path)!r} is a folder. Name a file in it, such as {str(self._path / 'trace.json')!r}"
            )
        try:
            # An interrupt in the middle would leave CUPTI taken.
            uninterrupted(self._begin)
            if self._path is not None:
                self._termination.__enter__()
        except BaseException:
            # An interrupt ends the wait, and not what is waited for: that gives back itself what it takes from here on.
            self._left = True
            if self._begun:
                self._abandon_once()
            self._termination.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if os.getpid() != self._process:
                return  # It is the parent's.
            with self._termination.later():
                self._finish(error)
        finally:
            self._termination.__exit__(None, None, None)
            if self._fate.setdefault(None, DROPPED) is DROPPED:
                # An interrupt came before anybody began to end it.
                self._abandon()

    @staticmethod
    def running() -> Trace | None:
        """Return the trace that runs in this process, for code that has no name for it; None: there is none."""
        return _running.get(None)

    @property
    def recording(self) -> Recording:
        """The events. Raises `XferError` while the trace runs."""
        found = self._recording
        if found is None:
            raise XferError("the trace has not ended. Ask when its block is over")
        return found

    def summary(self) -> Summary:
        """Return how busy the link was, how much of the copies lay under compute, and why the rest did not.

        `print` it, or take its parts. Raises `XferError` while the trace runs, as the others do.
        """
        return summarize(self.recording)

    def json(self, path: str | os.PathLike[str]) -> None:
        """Write the events in the JSON that ui.perfetto.dev and chrome://tracing open. All of them, some 150 bytes each."""
        chrome.write(self.recording, Path(path))

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with a table and a timeline, to be opened from disk: it loads nothing. At most 2 MB.

        If there are more events than fit, those that lie close together are drawn as one, and the page says so.
        """
        page.write(self.recording, Path(path))

    def png(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline with Matplotlib. Raises `XferError` if that is not installed."""
        picture.write(self.recording, Path(path))

    def __repr__(self) -> str:
        if self._recording is not None:
            return f"<Trace of {len(self._recording.events)} events>"
        return "<Trace, under way>" if self._start else "<Trace, not entered>"

    def _begin(self) -> None:
        try:
            if _running.setdefault(None, self) is not self:
                raise XferError(
                    "a trace runs in this process already, and there is one at a time. Run a program that traces itself without "
                    "xferlib trace. Else end that one first: one that an interrupt kept from ending with its block is ended by "
                    "xferlib.Trace.running().__exit__(None, None, None)"
                )
            if self._gpu and not has_gpu():
                raise XferError(
                    "gpu=True, and this process has no NVIDIA GPU, or its driver does not work: see xferlib doctor. Leave gpu "
                    "out to record what backends without a GPU do"
                )
            if self._gpu or (self._gpu is None and has_gpu()):
                self._gpus = Gpus()
            LOG.start()
            self._start = perf_counter_ns()
            # Callbacks may not enter an interpreter that goes down.
            atexit.register(self._end_at_exit)
        finally:
            self._begun = True
            if self._left:
                self._abandon_once()

    def _finish(self, error: BaseException | None) -> None:
        """End the trace and write it. What fails here is a note of the block's own error, if there is one."""
        try:
            uninterrupted(self._end)
            if self._path is not None:
                self.json(self._path)
        except Exception as failed:
            if error is None:
                raise
            what = "the trace was lost" if self._recording is None else "the trace was not written"
            error.add_note(f"xferlib: {what}: {type(failed).__name__}: {failed}")

    def _end(self) -> None:
        me = object()
        if self._fate.setdefault(None, me) is not me:
            return
        end = perf_counter_ns()
        LOG.stop()
        try:
            self._recording = uncollected(self._recorded, end)
        finally:
            self._abandon()

    def _recorded(self, end: int) -> Recording:
        if self._gpus is None:
            return _recording(self._start, end, NO_GPU, NO_COMPUTE)
        self._gpus.finish(LOG)
        return _recording(self._start, end, IDLE_GPU)

    def _end_at_exit(self) -> None:
        """End and write what still runs: in a thread that nobody waits for, or since an interrupt came as its block ended."""
        if _running.get(None) is not self:
            return  # This is a forked child.
        try:
            if not self._fate:
                # A signal waits, as at the end of the block.
                with self._termination.later():
                    # No thread can be started by now.
                    self._end()
                    if self._path is not None:
                        self.json(self._path)
            elif self._fate[None] is not DROPPED:
                # An interrupt came while another thread was at it, which the interpreter must not leave in the middle.
                self._wait_for_end()
        finally:
            self._abandon()

    def _wait_for_end(self) -> None:
        until = monotonic() + EXIT_SECONDS
        while _running.get(None) is self and monotonic() < until:
            sleep(LOOK_SECONDS)

    def _abandon_once(self) -> None:
        """Abandon what was left at its begin. The thread that begins it and the one that has left it may come here at once."""
        me = object()
        if self._given_back.setdefault(None, me) is me:
            self._abandon()

    def _abandon(self) -> None:
        atexit.unregister(self._end_at_exit)
        if _running.get(None) is self:
            LOG.stop()
            LOG.drop()
            gpus, self._gpus = self._gpus, None
            if gpus is not None and os.getpid() == self._process:
                with suppress(Exception):
                    gpus.abandon()
            _running.pop(None, None)


def _recording(start: int, end: int, if_empty: str, if_idle: str | None = None) -> Recording:
    """Put together what was noted. `if_empty`: the note where no device did anything; `if_idle`: where none computed."""
    names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
    events = [event for event in LOG.events if event.end >= start]
    notes = list(LOG.notes)
    if LOG.lost:
        notes.append(f"{LOG.lost} events of ours found no room. Trace fewer steps")
    # Where a note says what is missing already, that is why.
    if not notes and all(event.device == HOST for event in events):
        notes.append(if_empty)
    elif not notes and if_idle is not None and not any(event.kind == "kernel" for event in events):
        notes.append(if_idle)
    return Recording(
        events=tuple(sorted(events, key=lambda event: event.start)),
        start=start,
        end=end,
        devices=dict(LOG.devices),
        streams=dict(LOG.streams),
        null_streams=frozenset(LOG.null_streams),
        threads={**names, **LOG.threads},
        notes=tuple(notes),
    )
