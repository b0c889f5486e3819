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


def test_threads_that_are_first_at_once_in_a_forked_child_share_one_engine() -> None:
    assert (
        run(
            "import os, sys, threading, warnings\n"
            "import numpy as np, xferlib\n"
            "from xferlib.engine import native\n"
            "warnings.simplefilter('ignore')\n"
            "stager = xferlib.stager('host')\n"
            "stager.put(np.ones(4 << 20, np.uint8), borrow=True).result()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    several, copy, right = threading.Barrier(4), native._copy_of, []\n"
            "    def copied(path):\n"
            "        several.wait(20)\n"
            "        return copy(path)\n"
            "    native._copy_of = copied\n"
            "    def work():\n"
            "        with xferlib.stager('host') as own:\n"
            "            right.append(own.put(np.full(4 << 20, 7, np.uint8), borrow=True).result(20).min() == 7)\n"
            "    threads = [threading.Thread(target=work) for _ in range(4)]\n"
            "    for thread in threads: thread.start()\n"
            "    for thread in threads: thread.join(30)\n"
            "    os._exit(7 if right == [True] * 4 else 1)\n"
            "_, status = os.waitpid(child, 0)\n"
            "stager.close()\n"
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
