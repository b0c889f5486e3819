"""Memory that processes share: it has no name, keeps its size, and goes with the last who maps it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.steps import until
from tests.workers.conftest import shared_names
from xferlib.errors import AllocationError
from xferlib.pipeline.workers.memory import POPULATE_WRITE, SharedMemory, map_shared


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:xferlib")


def test_two_mappings_see_the_same_bytes_and_no_name_exists() -> None:
    before = shared_names()
    memory = SharedMemory(1 << 20)
    other = map_shared(memory.descriptor, 1 << 20)
    memory.raw[77] = 5
    assert other[77] == 5
    until(lambda: shared_names() <= before)
    memory.close()


def test_the_mapping_goes_with_its_last_array() -> None:
    before = mapped()
    memory = SharedMemory(1 << 20)
    view = memory.raw[5:9]
    number = memory.descriptor.number
    memory.close()
    memory.close()
    del memory
    assert mapped() == before + 1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    view[...] = 1
    del view
    assert mapped() == before


def test_nobody_can_cut_it_short() -> None:
    memory = SharedMemory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor.number, 4096)
    assert not np.any(memory.raw)
    memory.close()


def test_memory_that_cannot_be_had_is_refused_in_words() -> None:
    with pytest.raises(AllocationError, match=r"1\.0 EiB of shared memory could not be had"):
        SharedMemory(1 << 60)


def test_where_there_is_no_descriptor_to_be_had_nobody_else_s_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def refused(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        patch.setattr(os, "close", closed.append)
        with pytest.raises(AllocationError, match=r"1\.0 MiB of shared memory could not be had: .*too many open files"):
            SharedMemory(1 << 20)
    assert closed == []


@pytest.mark.parametrize("unknown", [mmap.MADV_HUGEPAGE, POPULATE_WRITE], ids=["huge pages", "populating"])
def test_a_kernel_that_does_not_know_an_advice_gives_memory_all_the_same(unknown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, option: int, *extent: int) -> None:
            if option == unknown:
                raise OSError(errno.EINVAL, "no such advice")
            super().madvise(option, *extent)

    monkeypatch.setattr("xferlib.pipeline.workers.memory.mmap.mmap", Mapping)
    memory = SharedMemory(1 << 20)
    memory.raw[...] = 3
    assert (memory.raw == 3).all()
    memory.close()
