"""How many workers may be killed before they have started, played with workers that are no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from xferlib.pipeline.workers.crew import STILLBORN, Crew
from xferlib.pipeline.workers.failures import WorkerDiedError


class Played:
    """A worker that has ended, or that has got through its start and lives."""

    def __init__(self, *, ready: bool) -> None:
        self.pid = 1
        self.ready = ready
        self.gone = not ready
        self.assigned: deque[Any] = deque()
        self.channel = self

    def flush(self) -> None: ...

    def hang_up(self) -> None: ...

    def replies(self) -> list[Any]:
        return []

    def end(self, patience: float) -> int:
        return -9


class Executor:
    """Calls on the spot."""

    def call(self, what: Callable[[], Any]) -> Any:
        return what()


@pytest.fixture
def crew() -> Iterator[Crew]:
    played: Any = Executor()
    crew = Crew(lambda: pytest.fail("nobody is to be started"), played)
    with closing(crew.bell):
        yield crew


def hear(crew: Crew, *, ready: bool) -> None:
    worker: Any = Played(ready=ready)
    crew._workers.append(worker)
    crew._heard(worker, dead=not ready)


def test_a_crew_gives_up_when_so_many_in_a_row_do_not_get_through_their_start(crew: Crew) -> None:
    for _ in range(STILLBORN - 1):
        hear(crew, ready=False)
        crew.enlist(0)
    hear(crew, ready=False)
    with pytest.raises(WorkerDiedError, match="could not start: it was killed by SIGKILL"):
        crew.enlist(0)


def test_those_before_one_that_has_started_do_not_count(crew: Crew) -> None:
    for _ in range(STILLBORN):
        hear(crew, ready=False)
        hear(crew, ready=True)
        crew.enlist(0)
