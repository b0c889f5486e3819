"""What the arrays of a tree are called in a file: the way to each, joined by dots."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from xferlib.tree import Mixed, Spec, Trees

__all__ = ["ALONE", "Named", "named"]

ALONE = "array"
"""The name of an array that is no tree."""


@final
class Named(NamedTuple):
    """A tree taken apart. `names` are those of `leaves`; `riders` is what rides along, by name."""

    leaves: list[Any]
    spec: Spec
    names: list[str]
    riders: dict[str, Any]


def named(trees: Trees, tree: Any) -> Named:
    """Take a tree apart. Raises `ValueError` where two of its leaves would have one name."""
    leaves, spec = trees.arrays(tree)
    if spec is None:
        return Named(leaves, spec, [ALONE], {})
    whole, riders = spec if isinstance(spec, Mixed) else (spec, {})
    names = [".".join(map(str, parts)) for parts in _ways(whole)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the tree are both called {twice!r} in a file, where dots join the keys. Rename one")
    arrays = [name for index, name in enumerate(names) if index not in riders]
    return Named(leaves, spec, arrays, {names[index]: value for index, value in riders.items()})


def _ways(spec: Any) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each leaf: of a named tuple the names."""
    paths: list[tuple[Any, ...]] = spec.paths()
    if not any(isinstance(part, int) for parts in paths for part in parts):
        # Most states, and in a tenth of the time.
        return paths
    return [tuple(getattr(entry, "field", entry.entry) for entry in accessor) for accessor in spec.accessors()]
