"""Move arrays between host and GPU while the GPU computes, the same way from every array library.

    with xferlib.stager("auto") as stager:
        images = stager.put(batch).value
        result = stager.get(255 - images).result()

What there is, and `help` of each says the rest:

    stager(name)                        opens a `Stager`; `backends()` are the names
    Stager.put, Stager.get              start a transfer to the device, to the host, and return a `Transfer` at once
    Transfer.value, .result(), .done()  let a stream wait for it, let the host wait, ask
    Stager.empty_pinned, Stager.pin     memory that the device reads directly: new, or yours (a `Pin`)
    Host(value)                         what stays on the host, in its place among the arrays of a tree
    prefetch(batches, stager)           batches on the device ahead of the loop that takes them (a `Prefetch`)
    drain(results, stager)              results on the host while later ones are computed (a `Drained`; by hand: `Drain`)
    stream_map(fn, batches, stager)     both, for data larger than the device
    Ring, SharedRing                    pinned slots that batches are written into: by you (a `Slot`), by processes (a `Run`)
    stack(items, slot)                  items of a dataset into the rows of a slot
    HostTree(tree, stager)              state that lives on the host, and is on the device while it is worked on
    load(path, stager)                  files to the device
    pin_files(path, stager)             files that are loaded again and again (`PinnedFiles`)
    save(path, tree, stager)            what is on the device to files, while the program goes on (a `Save`)
    measure_overlap(stager)             how much of a copy is hidden under compute on this machine (an `OverlapReport`)
    assert_overlaps(step)               whether a loop of yours overlaps, decided without a clock, or why it does not
    Report, Stats                       who waited for whom in a loop; what a stager has used
    trace(path)                         what copies and compute of the process did, and why they did not overlap (a `Trace`)
    XferError                           the root of what is raised

Backends are written against `HostStager`, `Event` and `Capabilities` of `xferlib.protocol`.
"""

from typing import TYPE_CHECKING

from xferlib.errors import AllocationError as AllocationError
from xferlib.errors import BackendUnavailableError as BackendUnavailableError
from xferlib.errors import CapabilityError as CapabilityError
from xferlib.errors import ClosedError as ClosedError
from xferlib.errors import SourceRewrittenError as SourceRewrittenError
from xferlib.errors import SynchronousTransferWarning as SynchronousTransferWarning
from xferlib.errors import TransferError as TransferError
from xferlib.errors import UndecidedError as UndecidedError
from xferlib.errors import UnknownBackendError as UnknownBackendError
from xferlib.errors import WorkerDiedError as WorkerDiedError
from xferlib.errors import WorkerError as WorkerError
from xferlib.errors import XferError as XferError
from xferlib.files.load import load as load
from xferlib.files.pinned_files import PinnedFiles as PinnedFiles
from xferlib.files.pinned_files import pin_files as pin_files
from xferlib.files.save import Save as Save
from xferlib.files.save import save as save
from xferlib.memory.registered import Pin as Pin
from xferlib.overlap.loops import assert_overlaps as assert_overlaps
from xferlib.overlap.measure import measure_overlap as measure_overlap
from xferlib.overlap.overlap_report import OverlapReport as OverlapReport
from xferlib.overlap.overlap_report import OverlapRow as OverlapRow
from xferlib.overlap.overlap_report import Spread as Spread
from xferlib.pipeline.drain import Drain as Drain
from xferlib.pipeline.drain import Results as Results
from xferlib.pipeline.drained import Drained as Drained
from xferlib.pipeline.drained import drain as drain
from xferlib.pipeline.host_tree import HostTree as HostTree
from xferlib.pipeline.memory_estimate import MemoryEstimate as MemoryEstimate
from xferlib.pipeline.prefetch import Prefetch as Prefetch
from xferlib.pipeline.prefetch import prefetch as prefetch
from xferlib.pipeline.report import Report as Report
from xferlib.pipeline.ring import Ring as Ring
from xferlib.pipeline.ring import Slot as Slot
from xferlib.pipeline.stacking import stack as stack
from xferlib.pipeline.stream_map import stream_map as stream_map
from xferlib.pipeline.workers.run import Run as Run
from xferlib.pipeline.workers.shared_ring import SharedRing as SharedRing
from xferlib.protocol import Capabilities as Capabilities
from xferlib.protocol import Event as Event
from xferlib.protocol import HostStager as HostStager
from xferlib.registry import backends as backends
from xferlib.registry import stager as stager
from xferlib.stager import Stager as Stager
from xferlib.staging.profile import StagingProfile as StagingProfile
from xferlib.stats import Stats as Stats
from xferlib.tracing.trace import Trace as Trace
from xferlib.tracing.trace import trace as trace
from xferlib.transfer import Transfer as Transfer
from xferlib.tree import Host as Host

__all__ = [
    "AllocationError",
    "BackendUnavailableError",
    "Capabilities",
    "CapabilityError",
    "ClosedError",
    "Drain",
    "Drained",
    "Event",
    "Host",
    "HostStager",
    "HostTree",
    "MemoryEstimate",
    "OverlapReport",
    "OverlapRow",
    "Pin",
    "PinnedFiles",
    "Prefetch",
    "Report",
    "Results",
    "Ring",
    "Run",
    "Save",
    "SharedRing",
    "Slot",
    "SourceRewrittenError",
    "Spread",
    "Stager",
    "StagingProfile",
    "Stats",
    "SynchronousTransferWarning",
    "Trace",
    "Transfer",
    "TransferError",
    "UndecidedError",
    "UnknownBackendError",
    "WorkerDiedError",
    "WorkerError",
    "XferError",
    "assert_overlaps",
    "backends",
    "drain",
    "load",
    "measure_overlap",
    "pin_files",
    "prefetch",
    "save",
    "stack",
    "stager",
    "stream_map",
    "trace",
]

if TYPE_CHECKING:
    from xferlib.pipeline.background import BackgroundIterator
    from xferlib.pipeline.phase_timer import PhaseTimer

    Bill = MemoryEstimate
    Clock = PhaseTimer
    Feed = BackgroundIterator
else:
    _RENAMED = {
        "Bill": "xferlib.MemoryEstimate",
        "Clock": "xferlib.pipeline.phase_timer.PhaseTimer",
        "Feed": "xferlib.pipeline.background.BackgroundIterator",
    }

    # Hidden from checkers, which would believe that every name is here.
    def __getattr__(name: str) -> object:
        """Give what was public once, with a warning; say where methods of a stager are."""
        if name not in _RENAMED:
            method = not name.startswith("_") and callable(getattr(Stager, name, None))
            advice = f". It is a method of a stager: stager.{name}(...)" if method else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
        import importlib
        import warnings

        home, _, kept = _RENAMED[name].rpartition(".")
        warnings.warn(f"xferlib.{name} is no part of the public face any more. It is {home}.{kept}", DeprecationWarning, 2)
        return getattr(importlib.import_module(home), kept)
