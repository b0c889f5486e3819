"""CUDA backends that are wrong about views of host memory and about write-combined memory, by means of no framework's own."""

from __future__ import annotations

from typing import Any

from tests.mutants.laws.broken import BrokenBackend
from tests.mutants.laws.cuda import Listing

__all__ = ["add_to"]

READS_AND_WRITES = "test_law01_the_device_reads_and_writes_mapped_memory"
UNDER_A_READER = "test_law08_mapped_memory_is_not_handed_out_under_a_reader"


class MapsACopy(BrokenBackend):
    """Gives an array in device memory that holds what the host memory held."""

    def as_mapped(self, address: int, shape: Any, dtype: Any, *, stream: Any, lease: object) -> Any:
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        block = self.inner.alloc_device(nbytes)
        self.inner.copy_h2d(block.address, address, nbytes)
        event = self.inner.record_h2d()
        event.synchronize()
        return self.inner.as_array(block, 0, shape, dtype, after=event, lease=(lease, block)), event.stream_wait(stream)


class LosesTheHostArray(BrokenBackend):
    """Lets the host array go, since the view needs only the address."""

    def as_mapped(self, *what: Any, lease: object, **rest: Any) -> Any:
        return self.inner.as_mapped(*what, lease=None, **rest)


class ForgetsTheStreamOfAView(BrokenBackend):
    """Says of no view where the work on it goes."""

    def as_mapped(self, *what: Any, **rest: Any) -> Any:
        return self.inner.as_mapped(*what, **rest)[0], None


class ForgetsTheFlag(BrokenBackend):
    """Takes the wish for write-combined memory, and allocates as ever."""

    def alloc_write_combined(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        return address


def add_to(listing: Listing) -> None:
    """List them for a framework whose arrays can be views."""
    listing.broken(f"{READS_AND_WRITES}[small]", f"{READS_AND_WRITES}[large]")(MapsACopy)
    listing.broken("test_law03_a_view_and_its_aliases_keep_the_host_memory")(LosesTheHostArray)
    listing.broken(f"{UNDER_A_READER}[small]", f"{UNDER_A_READER}[large]")(ForgetsTheStreamOfAView)
    listing.broken("test_law11_write_combined_memory_is_what_it_says_or_is_refused")(ForgetsTheFlag)
