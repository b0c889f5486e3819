"""What a demo is going to do: options in, sizes out. Everything that can be refused is refused here, before memory is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from xferlib.cli.demo.folder import FolderSource
from xferlib.cli.demo.result import check_space, in_memory
from xferlib.cli.demo.sample import bundled
from xferlib.cli.demo.source import Source, open_npy
from xferlib.cli.demo.team import cores
from xferlib.cli.demo.tile import check_memory
from xferlib.cli.errors import CommandError, require_plot
from xferlib.stager import Stager
from xferlib.workload import EdgeSpec

__all__ = ["Options", "Plan", "make_plan", "open_source"]

GPU_GIB, HOST_GIB = 2.0, 0.25
GPU_BATCH_MIB, HOST_BATCH_MIB = 32.0, 4.0
MOST_THREADS = 8
PINNED_SHARE = 0.8
"""Of the pinned limit: what a batch size that nobody asked for may take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. None: the default, which may depend on the backend."""

    path: Path | None
    backend: str
    device: int
    gib: float | None
    out: Path
    json_file: Path | None
    batch_mib: float | None
    depth: int
    threads: int | None
    rounds: int | None
    sheet: bool

    @property
    def result(self) -> Path:
        """The file of the result."""
        return self.out / "edges.npy"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`source` is to be tiled to `frames` frames if `tiled`."""

    source: Source
    tiled: bool
    frames: int
    threads: int
    spec: EdgeSpec


def open_source(options: Options) -> Source:
    """Check the places that the command line names and open the source. Raises `CommandError`."""
    if options.sheet:
        require_plot("the contact sheet (--no-sheet leaves it out)")
    path = options.path
    if path is not None and not path.exists():
        raise CommandError(f"there is no {str(path)!r}: expected a .npy file or a folder of images")
    if path is not None and path.resolve() == options.result.resolve():
        raise CommandError(f"{str(path)!r} would be overwritten by the result. Choose another folder with --out")
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise CommandError(f"there is no folder for {str(options.json_file)!r}. Make it, or name another file with --json")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {str(options.out)!r}: {error}. Choose another one with --out") from error
    if path is None:
        return bundled()
    return FolderSource(path) if path.is_dir() else open_npy(path)


def make_plan(options: Options, source: Source, stager: Stager) -> Plan:
    """Choose the sizes. Raises `CommandError` if the disk or the memory cannot hold them."""
    height, width = source.frame_shape[:2]
    channels = source.frame_shape[2] if len(source.frame_shape) == 3 else None
    threads = options.threads or max(1, min(MOST_THREADS, (cores() - 1) // 2))
    # Each thread has a slot in hand, and as many batches as the depth says are on their way.
    slots = options.depth + threads
    frame = EdgeSpec(frames=1, height=height, width=width, channels=channels, dtype=source.dtype, slots=slots)
    tiled = options.gib is not None or options.path is None
    frames = source.frames
    if tiled:
        gib = options.gib if options.gib is not None else GPU_GIB if stager.on_gpu else HOST_GIB
        frames = max(1, int(gib * 2**30) // frame.frame_nbytes)
    check_space(options.out, frames * height * width)
    check_memory((frames * frame.frame_nbytes if tiled else 0) + (frames * height * width if in_memory(options.out) else 0))
    batch = _batch(options, frame, frames, stager)
    return Plan(source=source, tiled=tiled, frames=frames, threads=threads, spec=replace(frame, frames=batch))


def _batch(options: Options, frame: EdgeSpec, frames: int, stager: Stager) -> int:
    """Return the frames of a batch. Unless asked for: the default size, the pinned limit, and enough batches to overlap."""
    if options.batch_mib is not None:
        return min(frames, max(1, int(options.batch_mib * 2**20) // frame.frame_nbytes))
    nbytes = int((GPU_BATCH_MIB if stager.on_gpu else HOST_BATCH_MIB) * 2**20)
    pinned = frame.slots * (frame.frame_nbytes + frame.height * frame.width)
    room = int(stager.stats().pinned_limit_nbytes * PINNED_SHARE) // pinned
    return max(1, min(nbytes // frame.frame_nbytes, room, frames // (2 * frame.slots)))
