"""Files that are loaded again and again, page-locked: each load of them is copied by the device alone."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import final

from xferlib.checks import uncopied
from xferlib.engine.native import library
from xferlib.errors import CapabilityError
from xferlib.files.locked_pages import Content, content, enter, leave
from xferlib.files.readers import shown
from xferlib.files.shards import Paths, select
from xferlib.memory.registered import Pin
from xferlib.stager import Stager, check_stager

__all__ = ["PinnedFiles", "pin_files"]


@final
class PinnedFiles:
    """Files whose pages are locked until `close()`, or until the stager closes. A context manager.

    Attributes:
        nbytes: Bytes of all of them, which are locked.
    """

    __reduce_ex__ = uncopied("Another process pins files itself")

    def __init__(self, pins: dict[Content, Pin]) -> None:
        self.nbytes = sum([pin.array.nbytes for pin in pins.values()])
        self._pins = pins

    def close(self) -> None:
        """Unlock the pages, when the transfers that use them are done. Twice is fine. Loads of the files go on to work."""
        _unpin(self._pins)

    def __enter__(self) -> PinnedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def pin_files(path: Paths, stager: Stager) -> PinnedFiles:
    """Page-lock files that are loaded many times, until the result is closed: `with xferlib.pin_files(path, stager): ...`.

    Meanwhile the device reads them by itself in every `load` of this process, by whatever stager of the same driver, and so do
    several devices at once. No CPU copies anything. `path` as for `load`, without `.npz`. What is not in the system's cache is read
    first. To lock takes 70 to 120 ms a GiB, in which nothing is launched. The pages count against the stager's `pinned_limit`, and
    the system can use them for nothing else.

    Once a file is replaced or changed, `load` gives what it holds then, as if it were not pinned: close this, and pin it anew. What
    was locked keeps its memory until then. The file must not be cut off while a load reads it: whoever touches a page that is gone
    is sent SIGBUS.

    Raises `CapabilityError` where the backend cannot page-lock memory of others, `AllocationError` where the limit has no room or
    the driver refuses, `ValueError` for an `.npz` and for files that are pinned already, and as `load` for files that are damaged
    or not there. Whatever is raised, nothing stays locked; behind an interrupt, not beyond the next call that pins or trims.
    """
    check_stager(stager, path)
    if not stager.capabilities.register:
        raise CapabilityError(f"backend {stager.name!r} cannot page-lock files. Leave pin_files out: they are loaded as they are")
    pins: dict[Content, Pin] = {}
    try:
        with ExitStack() as files:
            for reader in select(path, None, files).readers:
                found, pages = content(reader.stream), reader.pages()
                if pages is None:
                    raise ValueError(
                        f"{shown(reader.file)} cannot be pinned: members of an .npz are unpacked in memory. Save it as .safetensors"
                    )
                if reader.pinned:
                    raise ValueError(f"{shown(reader.file)} is pinned already. Keep that open for as long as it is loaded")
                if found in pins:
                    # It has no arrays, or another file would have them, too.
                    continue
                # Otherwise each page would be waited for by itself.
                library().xe_read_ahead(reader.stream.fileno(), 0, pages.nbytes)
                try:
                    pins[found] = stager.pin(pages)
                except (ValueError, MemoryError) as error:
                    error.add_note(f"pinning {shown(reader.file)}")
                    raise
        enter(pins)
        return PinnedFiles(pins)
    except BaseException:
        _unpin(pins)
        raise


def _unpin(pins: dict[Content, Pin]) -> None:
    leave(pins)
    with ExitStack() as steps:
        # Each whatever the others raise.
        for pin in pins.values():
            steps.callback(pin.close)
