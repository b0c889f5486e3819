"""What a demo is going to do: options in, sizes out. Everything that can be refused is refused here, before memory is taken."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from numpy.lib.format import MAGIC_PREFIX

from xferlib.cli.command_error import CommandError, require_plot
from xferlib.cli.demo.pictures import bundled, open_folder, open_image
from xferlib.cli.demo.result import partial_of
from xferlib.cli.demo.source import FrameSource, open_npy
from xferlib.memory.limits import available_memory
from xferlib.stager import Stager
from xferlib.workload import EdgeSpec

__all__ = ["Options", "check_memory", "open_source", "plan"]

GPU_GIB, HOST_GIB = 2.0, 0.25
GPU_BATCH_MIB, HOST_BATCH_MIB = 32.0, 4.0
PINNED_SHARE = 0.5
"""The share of the pinned limit that slots of a batch size which nobody asked for may take: results pass through chunks, too."""
MEMORY_SHARE = 0.9
"""The share of the available memory that the frames may take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. None: the default, which may depend on the backend."""

    path: Path | None
    backend: str
    device: int
    gib: float | None
    out: Path
    json_file: Path | None
    """"-": stdout."""
    batch_mib: float | None
    depth: int
    threads: int
    rounds: int | None
    sheet: bool

    @property
    def result(self) -> Path:
        """The file of the result."""
        return self.out / "edges.npy"

    @property
    def to_stdout(self) -> bool:
        """Whether the figures are the only thing on stdout."""
        return self.json_file == Path("-")

    @property
    def tiled(self) -> bool:
        """Whether the frames are repeated to a size."""
        return self.gib is not None or self.path is None


def open_source(options: Options, pool: Executor) -> FrameSource:
    """Check the places that the command line names and open the source. Raises `CommandError`."""
    if options.sheet:
        require_plot("the contact sheet (--no-sheet leaves it out)")
    path, file = options.path, options.json_file
    if path is not None and not path.exists():
        raise CommandError(f"there is no {str(path)!r}: expected a .npy file, an image or a folder of images")
    if path is not None and path.resolve() in (options.result.resolve(), partial_of(options.result).resolve()):
        raise CommandError(f"{str(path)!r} would be overwritten by the result. Choose another folder with --out")
    if file is not None and not options.to_stdout and file.is_dir():
        raise CommandError(f"{str(file)!r} is a folder. Name a file with --json")
    if file is not None and not options.to_stdout and not file.absolute().parent.is_dir():
        raise CommandError(f"there is no folder for {str(file)!r}. Make it, or name another file with --json")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {str(options.out)!r}: {error}. Choose another one with --out") from error
    if path is None:
        return bundled()
    if path.is_dir():
        return open_folder(path, pool)
    return open_npy(path) if path.suffix in (".npy", ".npz") or _begins_as_npy(path) else open_image(path)


def plan(options: Options, source: FrameSource, stager: Stager) -> tuple[int, EdgeSpec]:
    """Return how many frames, and the batches. Raises `CommandError` if the disk or the memory cannot hold the result."""
    height, width, *rest = source.frame_shape
    channels = rest[0] if rest else None
    # One result is under way, and `depth` more are behind it.
    slots = options.depth + 1
    frame = EdgeSpec(frames=1, height=height, width=width, channels=channels, dtype=source.dtype, slots=slots)
    frames = source.frames
    if options.tiled:
        gib = options.gib if options.gib is not None else GPU_GIB if stager.on_gpu else HOST_GIB
        # Infinity is no int.
        frames = max(1, int(min(gib * 2**30, sys.maxsize)) // frame.frame_nbytes)
    result = frames * height * width
    free = shutil.disk_usage(options.out).free
    if result > free:
        raise CommandError(
            f"the result takes {result / 2**30:.2f} GiB, {str(options.out)!r} has {free / 2**30:.2f} GiB free. "
            "Choose another folder with --out, or fewer frames with --gib"
        )
    check_memory((frames * frame.frame_nbytes if options.tiled else 0) + (result if _in_memory(options.out) else 0))
    return frames, replace(frame, frames=_batch(options, frame, frames, stager))


def check_memory(nbytes: int) -> None:
    """Raise `CommandError` if this machine, or our share of it, does not have that much memory left."""
    available = available_memory()
    if nbytes > MEMORY_SHARE * available:
        raise CommandError(
            f"{nbytes / 2**30:.1f} GiB of memory needed, {available / 2**30:.1f} GiB available. Lower --gib, or give a .npy file "
            "without --gib: it is read as it is needed"
        )


def _batch(options: Options, frame: EdgeSpec, frames: int, stager: Stager) -> int:
    """Return the frames of a batch: as asked for, or by the default size, the pinned limit, and the batches needed to overlap."""
    if options.batch_mib is not None:
        return max(1, int(min(options.batch_mib * 2**20, frames * frame.frame_nbytes)) // frame.frame_nbytes)
    nbytes = int((GPU_BATCH_MIB if stager.on_gpu else HOST_BATCH_MIB) * 2**20)
    # Those in the hands of a thread, and those that are under way.
    slots = options.threads + options.depth
    room = int(stager.stats().pinned_limit_nbytes * PINNED_SHARE) // (slots * frame.frame_nbytes)
    return max(1, min(nbytes // frame.frame_nbytes, room, frames // (2 * slots)))


def _begins_as_npy(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error}") from error


def _in_memory(folder: Path) -> bool:
    """Tell whether files in this folder take memory, as those in /dev/shm do."""
    place = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")
