"""The warning about a transfer that should be asynchronous, but makes its caller wait.

A put of memory that no copy engine can read returns when the CPU has copied it. Ordinary programs do so all the time and are warned
once for each line. A strict stager refuses such a put before anything starts. A get makes nobody wait for more than microseconds:
threads of ours take the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import final

from xferlib.callers import user_frame, warn_at
from xferlib.errors import SynchronousTransferWarning
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.host import HostLeaf
from xferlib.memory.pinned_pool import pinned_or_pending
from xferlib.tree import Spec, note_place
from xferlib.words import in_words

__all__ = ["WARN_FROM_NBYTES", "PageableWarning"]

WARN_FROM_NBYTES = 256 << 10
"""Bytes of one put. The CPU copies less in the time that starting the transfer takes."""
PAGEABLE = "the array is not in pinned memory. Fill one from stager.empty_pinned(...) instead, or lock yours with stager.pin(array)"
STRIDED = "the array is not contiguous. Lay it out in C order, in an array from stager.empty_pinned(...)"
BORROW = ", or let put borrow it until the transfer is done: put(..., borrow=True)"
"""A put into arrays of the caller's borrows nothing."""
NBYTES = attrgetter("nbytes")


@final
class PageableWarning:
    """Warns, or raises if `strict`. Any thread. Asked before a put starts that does not borrow its sources.

    Nobody is warned of memory that a pool of ours has, and has locked or soon will.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict

    def concerns(self, nbytes: int) -> bool:
        """Tell whether to ask about so many bytes of pageable memory."""
        return self._strict or nbytes >= WARN_FROM_NBYTES

    def put(self, sources: Sequence[HostLeaf], spec: Spec | None = None, *, into: bool = False) -> None:
        """Look at all leaves of a put, which is `into` arrays of the caller's or not. `spec` tells where they stand in a tree."""
        staged = [array for array, address in sources if address is None]
        if staged and self.concerns(sum(map(NBYTES, staged))):
            index = next(index for index, (_, address) in enumerate(sources) if address is None) if self._strict else 0
            self.warn(staged, spec, index, into=into)

    def warn(
        self, arrays: Sequence[Array], spec: Spec | None = None, index: int = 0, *, into: bool = False, outside: bool = False
    ) -> None:
        """Warn of pageable arrays that concern somebody, unless all of them are pinned, or soon will be.

        `index`: where the first stands. `outside`: they lie in memory of no pool.
        """
        frame = user_frame()
        # On a thread that runs ours alone: it runs ahead of its caller, and nobody waits.
        if frame.f_globals.get("__name__") == "threading" or (not outside and _are_pinned_or_pending(arrays)):
            return
        if self._strict:
            raise _refusal(arrays[0], spec, index, into)
        largest = arrays[0] if len(arrays) == 1 else max(arrays, key=NBYTES)
        # Without figures, which would make a new text each time: Python shows a text once a line, and batches differ in size.
        warn_at(frame, _TEXTS[largest.flags.c_contiguous, into], SynchronousTransferWarning)


def _are_pinned_or_pending(arrays: Sequence[Array]) -> bool:
    # A loop: a generator would take as long as all else here, and mostly there is one array.
    for array in arrays:  # noqa: SIM110
        if not pinned_or_pending(address_of(array), array.nbytes):
            return False
    return True


def _refusal(array: Array, spec: Spec | None, index: int, into: bool) -> ValueError:
    error = ValueError(
        f"this stager is strict, and put would wait for a CPU copy of {in_words(array.nbytes)}, {array.dtype} of shape "
        f"{array.shape}: {_reason(array.flags.c_contiguous, into)}"
    )
    if spec is not None:
        note_place(error, spec, index)
    return error


def _reason(contiguous: bool, into: bool) -> str:
    return (PAGEABLE if contiguous else STRIDED) + ("" if into else BORROW)


_TEXTS = {
    (contiguous, into): f"put waits for a CPU copy: {_reason(contiguous, into)}"
    for contiguous in (True, False)
    for into in (True, False)
}
