"""What needs a process of its own: the interpreter's end, a fork, and errors from which a CUDA context does not recover."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests import children
from tests.frameworks.kits.every import CUDA_KITS, given
from tests.frameworks.kits.kit import CudaKit, Kit
from xferlib.stager import Stager

LIMIT_SECONDS = 90.0

PRELUDE = """
import warnings
import numpy as np, xferlib

stager = xferlib.stager({name!r})
source = stager.empty_pinned(1 << 20, np.uint8)
source[...] = 7
# Python and JAX warn of forking a process with threads: for some of these programs that is what they are about.
warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)
"""

ENDINGS = {
    "arrays_of_an_open_stager": "array = stager.put(source).value",
    "arrays_of_a_closed_stager": "array = stager.put(source).result(); got = stager.get(array).result(); stager.close()",
    "transfers_in_flight": "transfers = [stager.put(source) for _ in range(100)]",
    "pageable_gets_in_flight": "array = stager.put(source).value; transfers = [stager.get(array, out=np.empty(1 << 20, np.uint8))]",
    "a_cycle_of_arrays": "array = stager.put(source).value; cycle = [array]; cycle.append(cycle)",
    "pinned_memory": "stager.close()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_cleanly_with(kit: Kit, stager: Stager, ending: str) -> None:
    run(kit, ENDINGS[ending])


def test_a_forked_child_is_refused(kit: Kit, stager: Stager) -> None:
    run(
        kit,
        """
        import os

        array = stager.put(source).result()
        child = os.fork()
        if child == 0:
            try:
                stager.put(source)
            except xferlib.BackendUnavailableError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (stager.get(array).result() == 7).all()
        stager.close()
        """,
    )


# What JAX does when its own arrays die in a forked child is not for a stager to say.
@given(*CUDA_KITS)
def test_a_child_that_drops_everything_harms_nobody(kit: Kit, stager: Stager) -> None:
    run(
        kit,
        """
        import gc, os

        array = stager.put(source).result()
        child = os.fork()
        if child == 0:
            del array, source, stager
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (stager.get(array).result() == 7).all()
        stager.close()
        """,
    )


QUESTIONS = {
    "done": "while not later.done(): pass",
    "synchronize": "later.synchronize()",
    "result": "later.result()",
    "result_with_a_timeout": "later.result(timeout=60)",
}


@given(*CUDA_KITS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_error_of_the_device_is_raised_and_never_takes_for_ever(kit: CudaKit, stager: Stager, question: str) -> None:
    run(
        kit,
        kit.crash,
        f"""
        import os

        try:
            wait_for_the_device()
        except stager.backend.failures:
            pass
        for start in (lambda: stager.put(source), lambda: stager.put(np.ones(9))):
            try:
                later = start()
                {QUESTIONS[question]}
            except xferlib.TransferError as error:
                assert isinstance(error.__cause__, stager.backend.failures), error.__cause__
            except xferlib.AllocationError:
                pass
            else:
                raise AssertionError("a transfer on a device that has failed was reported as done")
        # Nothing can be given back to such a device.
        os._exit(0)
        """,
    )


def run(kit: Kit, *scripts: str) -> None:
    """Run the scripts behind the prelude, and assert that they end well and say nothing."""
    program = PRELUDE.format(name=kit.name) + "".join(map(textwrap.dedent, scripts))
    child = children.run([sys.executable, "-c", program], seconds=LIMIT_SECONDS)
    assert (child.returncode, child.stdout + child.stderr) == (0, "")
