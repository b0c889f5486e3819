"""What was seen of a loop, as values: calls of CUDA, and what became of them while work was held. Nothing here asks a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, final

__all__ = ["DIRECTIONS", "LEGACY", "Baseline", "CallKind", "CopyDirection", "CudaCall", "HeldSteps", "Site", "Stuck"]

CopyDirection: TypeAlias = Literal["h2d", "d2h"]
DIRECTIONS: tuple[CopyDirection, ...] = ("h2d", "d2h")
CallKind: TypeAlias = Literal["launch", "copy", "set", "record", "wait", "sync stream", "sync event", "sync device", "memory"]

LEGACY = 1
"""The handle of the NULL stream, CUDA's legacy default stream. 0 means the same where programs are not compiled otherwise."""


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@final
@dataclass(kw_only=True)
class CudaCall:
    """A call of CUDA, in the order in which calls were entered. Its end is filled in while work is held.

    Attributes:
        serial: Calls entered later have greater ones.
        step: The step of the loop that was under way, counted from when calls are first recorded.
        in_loop: Whether the thread that runs the loop made it.
        kind, function: What it does, and its name.
        stream: The handle it works on; None where it names none.
        blocking: Whether that stream and the NULL stream wait for each other.
        event: The handle of the event that it records or waits for.
        direction, nbytes: Of a copy between host and device; None for other copies.
        pageable: Whether the copy's host memory is pageable.
        address: Where on the device the copy writes or reads.
        site: The line that made the call; None on a thread without Python.
        near: Where the loop was then, if `site` is None.
        returned: Whether the call returned while work was held.
        done: Whether what it enqueued was done while work was held.
    """

    serial: int
    step: int
    in_loop: bool
    kind: CallKind
    function: str
    stream: int | None = None
    blocking: bool = False
    event: int | None = None
    direction: CopyDirection | None = None
    nbytes: int = 0
    pageable: bool = False
    address: int = 0
    site: Site | None = None
    near: Site | None = None
    returned: bool = False
    done: bool = False


@final
@dataclass(frozen=True)
class Stuck:
    """Where the loop stood, without progress, until the gate was opened.

    Attributes:
        step: The step that it was in.
        call: The call of CUDA that it was in; None: in none.
        site: The line of the user's code.
        inside: The innermost Python function, for people.
        freed: Whether it went on once the gate was open.
    """

    step: int
    call: CudaCall | None
    site: Site | None
    inside: str
    freed: bool


@final
@dataclass(frozen=True, kw_only=True)
class HeldSteps:
    """Some steps of the loop while one kind of work was held.

    Attributes:
        what: "compute": the launches on the compute streams. A direction: its copies.
        first_step: The step with which it began; nothing was under way then.
        start, end: The serials of the calls that were made while it was held, from the first to before the last.
        gates: By stream, the serial of the first call that was held there. What follows on that stream is behind it.
        steps: How many steps returned while the gate was shut.
        launched: By step, how many launches were made on the compute streams while the gate was shut.
        computed: The steps whose launches were all done while the gate was shut.
        stuck: Where the loop stood when the gate was opened; None: it had made all its steps.
        overdue: Whether the gate had to be opened from outside, so that nothing more can be said.
    """

    what: Literal["compute", "h2d", "d2h"]
    first_step: int
    start: int
    end: int
    gates: dict[int, int]
    steps: int
    launched: dict[int, int]
    computed: frozenset[int]
    stuck: Stuck | None
    overdue: bool = False

    def step_not_computed(self, launches: int) -> int:
        """Return the first step whose compute was not all done. `launches`: the fewest launches of a step."""
        step = self.first_step
        while step in self.computed and (step < self.first_step + self.steps or self.launched.get(step, 0) >= launches):
            step += 1
        return step


@final
@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What steps do when nothing is held.

    Attributes:
        steps: How many were looked at. Between them, everything came to rest.
        nbytes: By direction, bytes of large copies in each step.
        compute: The streams that count as compute.
        launches: The fewest launches on these in a step.
        slots: By direction, on how many places of the device the copies of all steps lie, over those of one step.
        smallest: Bytes from which on a copy is large.
    """

    steps: int
    nbytes: dict[CopyDirection, Sequence[int]]
    compute: frozenset[int]
    launches: int
    smallest: int
    slots: dict[CopyDirection, float] = field(default_factory=dict)

    def is_large(self, call: CudaCall) -> bool:
        """Tell whether the call is a large copy between host and device."""
        return call.kind == "copy" and call.direction is not None and call.nbytes >= self.smallest

    def copies(self, calls: Sequence[CudaCall], direction: CopyDirection) -> Iterator[CudaCall]:
        """Yield the large copies of a direction."""
        return (call for call in calls if call.direction == direction and self.is_large(call))
