"""A program as data: options, and steps that name what they use. It can be printed, kept, and shortened step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

__all__ = ["Program", "Step"]

Arguments: TypeAlias = dict[str, Any]
"""JSON. Names of what earlier steps made are strings."""


@final
@dataclass(frozen=True)
class Step:
    """One step. `branches`: the steps of each thread, where the step is several threads."""

    kind: str
    arguments: Arguments
    branches: tuple[tuple[Step, ...], ...] = ()

    def lines(self, indent: str = "") -> list[str]:
        made = self.arguments.get("to")
        words = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items() if name != "to" and value is not None)
        lines = [f"{indent}{f'{made} = ' if made else ''}{self.kind}({words})"]
        for number, branch in enumerate(self.branches):
            lines.append(f"{indent}  thread {number}:")
            for step in branch:
                lines += step.lines(indent + "    ")
        return lines

    def as_json(self) -> list[Any]:
        return [self.kind, self.arguments, [[step.as_json() for step in branch] for branch in self.branches]]

    @staticmethod
    def from_json(found: list[Any]) -> Step:
        kind, arguments, branches = found
        return Step(kind, arguments, tuple(tuple(map(Step.from_json, branch)) for branch in branches))


@final
@dataclass(frozen=True)
class Program:
    """Options are of the whole: `threshold`, how often the collector runs by itself."""

    backend: str
    steps: tuple[Step, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def with_steps(self, steps: tuple[Step, ...]) -> Program:
        return replace(self, steps=steps)

    @property
    def count(self) -> int:
        """The steps, those of threads included."""
        return sum(1 + sum(map(len, step.branches)) for step in self.steps)

    def __str__(self) -> str:
        head = f"# {self.backend}, {self.options}"
        return "\n".join([head, *(line for step in self.steps for line in step.lines())])

    def to_json(self) -> str:
        # A line a step: these files are read by people, too.
        steps = ",\n  ".join(json.dumps(step.as_json()) for step in self.steps)
        return f'{{"backend": {json.dumps(self.backend)}, "options": {json.dumps(self.options)}, "steps": [\n  {steps}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Program:
        found = json.loads(text)
        return Program(found["backend"], tuple(map(Step.from_json, found["steps"])), found["options"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
