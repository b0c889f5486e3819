"""Trees of a few forms, built and taken apart without the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

from tests.random_programs.content import Wrong

__all__ = ["FORMS", "Pair", "Record", "built", "flat"]

NAME, NUMBER = "rides along", 7
FORMS = ("leaf", "list", "tuple", "dict", "pair", "record", "nested")


class Pair(NamedTuple):
    first: Any
    rest: Any


@final
@dataclass
class Record:
    first: Any
    nothing: None
    name: str
    rest: Any


def built(form: str, leaves: list[Any]) -> Any:
    """Build a tree of this form. `leaf` has one."""
    match form:
        case "leaf":
            (leaf,) = leaves
            return leaf
        case "list":
            return list(leaves)
        case "tuple":
            return tuple(leaves)
        case "dict":
            return {_key(index): leaf for index, leaf in enumerate(leaves)}
        case "pair":
            return Pair(leaves[0], leaves[1:])
        case "record":
            return Record(leaves[0], None, NAME, leaves[1:])
    middle = len(leaves) // 2
    return {"a": [tuple(leaves[:middle]), None], "b": {"c": leaves[middle:], "d": (), "e": NUMBER}}


def flat(form: str, tree: Any) -> list[Any]:
    """Take a tree of this form apart. Raises `Wrong` if it is of another."""
    try:
        match form, tree:
            case "leaf", _:
                return [tree]
            case "list", list():
                return list(tree)
            case "tuple", tuple():
                return list(tree)
            case "dict", dict():
                return [tree[_key(index)] for index in range(len(tree))]
            case "pair", Pair(first=first, rest=list() as rest):
                return [first, *rest]
            case "record", Record(first=first, nothing=None, name=name, rest=list() as rest) if name == NAME:
                return [first, *rest]
            case "nested", {"a": [tuple() as before, None], "b": {"c": list() as after, "d": (), "e": int() as number}} if (
                number == NUMBER
            ):
                return [*before, *after]
    except KeyError as error:
        raise Wrong(f"a tree of the form {form} came back without {error}") from error
    raise Wrong(f"a tree of the form {form} came back as {type(tree)}")


def _key(index: int) -> str:
    # In the order of the leaves, also where keys are sorted.
    return f"k{index:04}"
