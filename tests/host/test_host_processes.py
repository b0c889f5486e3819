"""The ends of processes: threads that are held, copies that have started, and forked children."""

from __future__ import annotations

import sys
import time

from xferlib_host._worker import Worker

from tests import children
from tests.host.work import SECONDS


def run(program: str) -> str:
    ended = children.run([sys.executable, "-c", program], seconds=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_process_ends_though_a_direction_is_held_for_ever() -> None:
    assert (
        run(
            "import threading\n"
            "from xferlib_host import Stream, open_stager\n"
            "stager, stream = open_stager(), Stream()\n"
            "stager.h2d.submit(threading.Event().wait)\n"
            "stream.submit(threading.Event().wait)\n"
            "print('end')\n"
        )
        == "end\n"
    )


def test_a_process_that_ends_lets_started_copies_end_first() -> None:
    assert (
        run(
            "import threading\n"
            "from xferlib_host import open_stager\n"
            "stager, started = open_stager(), threading.Event()\n"
            "def job():\n"
            "    started.set()\n"
            "    total = sum(range(1_000_000))\n"
            "    print('copied', flush=True)\n"
            "stager.h2d.submit(job)\n"
            "started.wait()\n"
        )
        == "copied\n"
    )


def test_a_forked_child_ends_by_itself() -> None:
    assert (
        run(
            "import os, sys, warnings\n"
            "warnings.simplefilter('ignore', DeprecationWarning)\n"
            "from xferlib_host import Stream, open_stager\n"
            "stager, stream = open_stager(), Stream()\n"
            "block, pinned = stager.alloc_device(100), stager.alloc_pinned(100)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    stager.free_pinned(pinned)\n"
            "    stager.close()\n"
            "    stream.close()\n"
            "    sys.exit(7)\n"
            "_, status = os.waitpid(child, 0)\n"
            "stager.record_h2d().synchronize()\n"
            "print(os.waitstatus_to_exitcode(status))\n"
        )
        == "7\n"
    )


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    worker = Worker("ended")
    worker.close()
    began = time.monotonic()
    worker.drain(SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_no_stream_has_the_handle_0() -> None:
    assert run("from xferlib_host import Stream\nprint(Stream().handle != 0)\n") == "True\n"
