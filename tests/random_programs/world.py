"""What a running program has: things by name, what is known of each, and what is held meanwhile.

The model is in the records: what every array must hold, what may still read or write host memory, and on which streams device
arrays may be used. It knows the documented rules only.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

import xferlib
from tests.random_programs.canary import Canary
from tests.random_programs.content import Array, Content, Wrong, assert_holds
from tests.random_programs.kits import Kit
from tests.random_programs.release import RELEASER
from tests.random_programs.trees import flat

__all__ = ["CURRENT", "HOST", "Device", "Hold", "Host", "Leaf", "Opened", "Reader", "Skip", "Started", "World"]

HOST = "the host"
"""Where an array may be used once the host has waited for it: on every stream."""
CURRENT = "the current stream"
MANY = 16

T = TypeVar("T")


class Skip(Exception):
    """Raised by a step that cannot be done: what it uses is not there, since a step before was left out, or refused."""


@final
class Opened:
    """A stager. `tight`: it has limits that may refuse what is asked."""

    def __init__(self, stager: xferlib.Stager, device: int, *, tight: bool) -> None:
        self.stager = stager
        self.device = device
        self.tight = tight
        self.closed = False


@final
class Leaf:
    """A host array. `memory`: what kind it was made of. `locked`: somebody may have page-locked it."""

    def __init__(self, array: Array, content: Content, memory: str) -> None:
        self.array = array
        self.content = content
        self.memory = memory
        self.locked = memory in ("pinned", "view")


@final
class Host:
    """A tree of host arrays. `busy`: what may still read or write it. `slot`: the ring's, if it is of one."""

    def __init__(self, leaves: list[Leaf], tree: Any, *, form: str, slot: Any = None) -> None:
        self.leaves = leaves
        self.tree = tree
        self.form = form
        self.slot = slot
        self.busy: dict[Any, str] = {}
        """By whom: a stager's name."""
        self.written_by: list[Any] = []
        self.lost = False
        """Nobody can know any more when it may be written."""

    @property
    def writable(self) -> bool:
        return not self.lost and all(leaf.memory != "readonly" for leaf in self.leaves)


class Device:
    """Device arrays. `order`: keys of streams on which they may be used. `started`: the transfer, while the program keeps it."""

    def __init__(
        self, arrays: list[Any], cells: list[list[Content]], *, form: str, device: int, views: tuple[str, ...] = ()
    ) -> None:
        self.arrays = arrays
        self.cells = cells
        """By array, one content: shared with those that are views of it, since `into` changes all."""
        self.form = form
        self.device = device
        self.views = views
        self.order: set[str] = set()
        self.started: Started | None = None
        self.foreign = False
        """Made by the framework, so that the library knows no stream that reads it."""
        self.plain = not views
        """In C order."""

    def shares(self, cells: list[list[Content]]) -> bool:
        """Tell whether it has arrays of these in its own."""
        mine = {id(cell) for cell in self.cells}
        return any(id(cell) in mine for cell in cells)

    def content(self, index: int) -> Content:
        content = self.cells[index][0]
        for how in self.views:
            content = content.view(how)
        return content


@final
class Started:
    """A transfer. `contents`: what its arrays will hold."""

    def __init__(self, transfer: Any, contents: list[Content], *, form: str, device: int, to_host: bool) -> None:
        self.transfer = transfer
        self.end = transfer.completion
        self.contents = contents
        self.form = form
        self.device = device
        self.to_host = to_host
        self.cells = [[content] for content in contents]
        self.out: Host | None = None
        self.into: Device | None = None
        self.taken = False
        """Whether the program has the arrays of a get."""
        self.over: Started | None = None
        """What was put into the same arrays since."""
        self.out_is_ours = True
        """Whether `out` holds what a get wrote there until the program writes it: not when it is a slot that went back."""
        self.asked: set[str] = set()
        """Keys of streams that were made to wait for it, or `HOST`."""


@final
class Hold:
    """What is prevented from completing until it is released."""

    def __init__(self, stack: ExitStack, hold: Any) -> None:
        self.stack = stack
        self.hold = hold
        self.stream = hold.stream
        self.over = False
        self.ahead = 0
        """How many arrays were put behind it."""


@final
class Reader:
    """Work on the device that reads an array, behind what is held; and what it must have read."""

    def __init__(self, hold: str, values: Any, content: Content, keep: Any, cell: list[Content] | None = None) -> None:
        self.hold = hold
        self.values = values
        self.content = content
        self.keep = keep
        self.cell = cell
        """That of the device array, by whatever name it is known; None: it reads host memory."""
        self.seen = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Wait for the work and look at what it read. Once; only when its hold is released."""
        with self._lock:
            if not self.seen:
                self.seen = True
                values = self.values()
                self.values = self.keep = None
                assert_holds(values, self.content, "what a held reader read")

    def synchronize(self) -> None:
        self.check()


@final
class World:
    """One program's things. A thread of the program has a world of its own, whose parent's it may use and not change."""

    def __init__(self, kit: Kit, parent: World | None = None, prefix: str = "") -> None:
        self.kit = kit
        self.parent = parent
        self.things: dict[str, Any] = {}
        self.readers: list[Reader] = [] if parent is None else parent.readers
        self.canaries: dict[str, tuple[Canary, Array]] = {}
        self.holds: dict[str, Hold] = {} if parent is None else parent.holds
        self.gone: list[xferlib.Stager] = [] if parent is None else parent.gone
        """Those that are closed, for the account at the end."""
        self.doing = ""
        self.finalized: list[str] = []
        self._folder: Path | None = None
        self._making = threading.Lock()

    @property
    def folder(self) -> Path:
        """A folder for files, made when it is first wanted."""
        if self.parent is not None:
            return self.parent.folder
        with self._making:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="xferlib-programs-"))
            return self._folder

    def end(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def find(self, name: str, kind: type[T], *, own: bool = False) -> T:
        """Return a thing. `own`: it is to be changed, so it must not be another thread's too. Raises `Skip`."""
        thing = self.things.get(name)
        if thing is None and self.parent is not None and not own:
            return self.parent.find(name, kind)
        if not isinstance(thing, kind):
            raise Skip(f"there is no {name}")
        return thing

    def stager(self, name: str) -> Opened:
        opened = self.find(name, Opened)
        if opened.closed:
            raise Skip(f"{name} is closed")
        return opened

    def all(self, kind: type[T]) -> list[T]:
        return [thing for thing in self.things.values() if isinstance(thing, kind)]

    # What is held.

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Release what is held if this is blocked for some milliseconds: what it waits for may be held."""
        if not self.holds:
            yield
            return
        with RELEASER.watch(self.kit.patience, self.release_all):
            yield

    def run_ahead(self, arrays: int) -> None:
        """Note that so many are put. What is held is released where no more may stand behind it."""
        for hold in list(self.holds.values()):
            # Many are imported as one.
            hold.ahead += min(arrays, MANY)
            if self.kit.most_ahead is not None and hold.ahead > self.kit.most_ahead:
                hold.hold.release()

    def release_all(self) -> None:
        for hold in list(self.holds.values()):
            hold.hold.release()

    def end_hold(self, name: str) -> None:
        """Release, and wait for all that was held and for all that was enqueued behind it."""
        hold = self.holds.pop(name, None)
        if hold is None or hold.over:
            raise Skip(f"nothing is held by {name}")
        hold.over = True
        hold.hold.release()
        mine = [reader for reader in self.readers if reader.hold == name]
        for reader in mine:
            reader.check()
            self.readers.remove(reader)
        if hold.stream is not None:
            hold.stream.synchronize()
        hold.stack.close()
        # The host has waited for all that these streams waited for.
        for device in self.all(Device):
            if name in device.order:
                device.order.add(HOST)

    # Streams.

    def stream(self, name: str | None) -> Any:
        """Return a stream by the name of it or of a hold; None for None."""
        if name is None:
            return None
        hold = self.holds.get(name)
        if hold is not None:
            if hold.stream is None:
                raise Skip(f"{name} has no stream")
            return hold.stream
        return self.find(name, Named).stream

    def may_use(self, device: Device, key: str | None) -> None:
        """Order later work on a stream (None: the thread's current one) behind what makes the arrays. Raises `Skip`."""
        wanted = CURRENT if key is None else key
        if not self.kit.flags.streams or wanted in device.order or HOST in device.order:
            return
        if device.started is None:
            raise Skip("the transfer is gone, and with it the way to name another stream")
        device.started.transfer.stream_wait(self.stream(key))
        device.order.add(HOST if key is None and not self.kit.on_gpu else wanted)

    def on_host(self, device: Device) -> None:
        """Make the host wait until the arrays hold what they should. Raises `Skip`."""
        if HOST in device.order or not self.kit.flags.streams:
            return
        if device.started is not None:
            device.started.transfer.synchronize()
        elif CURRENT in device.order:
            self.kit.settle(device.device)
        else:
            raise Skip("the transfer is gone, and its stream is held or gone")
        device.order.add(HOST)

    # Host memory.

    def quiet(self, host: Host) -> None:
        """Wait for everything that may read or write host arrays, as a program must that writes them."""
        if host.lost:
            raise Skip("nobody knows when it may be written")
        for end in list(host.busy):
            end.synchronize()
            host.busy.pop(end, None)
        host.written_by.clear()

    def quiet_but_for(self, host: Host, stager: str) -> None:
        """Wait for what others than this stager may do to host arrays."""
        for end, by in list(host.busy.items()):
            if by != stager:
                end.synchronize()

    def settled(self, host: Host) -> None:
        """Wait for what writes host arrays, as a program must that reads them."""
        if host.lost:
            raise Skip("nobody knows when it may be read")
        for end in host.written_by:
            end.synchronize()

    def check_host(self, host: Host, what: str) -> None:
        self.settled(host)
        for index, leaf in enumerate(host.leaves):
            assert_holds(leaf.array, leaf.content, f"{what}, leaf {index}")

    def check_device(self, device: Device, what: str) -> None:
        """Look at device arrays without a stager."""
        self.on_host(device)
        if device.foreign and self.kit.wait_holds_gil:
            # It may be what held work makes, and nobody else runs while this thread waits.
            self.release_all()
        for index, array in enumerate(device.arrays):
            assert_holds(self.kit.read(array), device.content(index), f"{what}, leaf {index}")

    def check_result(self, form: str, value: Any, contents: list[Content], what: str) -> list[Any]:
        """Return the leaves of what a transfer gave, after a look at its structure and, on the host, at its bytes."""
        leaves = flat(form, value)
        if len(leaves) != len(contents):
            raise Wrong(f"{what}: {len(leaves)} leaves instead of {len(contents)}")
        return leaves

    def check_canaries(self) -> None:
        for name, (canary, pattern) in self.canaries.items():
            if not (canary.read()[: pattern.nbytes] == pattern).all():
                raise Wrong(f"memory of others was written: {name} of {pattern.nbytes} bytes")


@final
class Named:
    """A stream of the program's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
