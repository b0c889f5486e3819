"""What the arrays of a tree are called in a file: the way to each, joined by dots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import optree

from xferlib.tree import Mixed, Spec, Trees

__all__ = ["ALONE", "NamedLeaves", "named_leaves", "names_of"]

ALONE = "array"
"""The name of an array that is no tree."""


@final
class NamedLeaves(NamedTuple):
    """A tree taken apart. `names` are those of `leaves`; `riders` is what rides along, by name."""

    leaves: list[Any]
    spec: Spec
    names: list[str]
    riders: dict[str, Any]


def named_leaves(trees: Trees, tree: Any) -> NamedLeaves:
    """Take a tree apart. Raises `ValueError` where two of its leaves would have one name."""
    leaves, spec = trees.arrays(tree)
    return NamedLeaves(leaves, spec, *names_of(spec))


def names_of(spec: Spec) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a tree's arrays, and what rides along, by name. Raises as `named_leaves`."""
    if spec is None:
        return [ALONE], {}
    whole, riders = spec if isinstance(spec, Mixed) else (spec, {})
    names: list[str] = []
    _enter(whole, "", names)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the tree are both called {twice!r} in a file, where dots join the keys. Rename one")
    arrays = [name for index, name in enumerate(names) if index not in riders] if riders else names
    return arrays, {names[index]: value for index, value in riders.items()}


def _enter(spec: optree.PyTreeSpec, way: str, names: list[str]) -> None:
    """Enter the names of the leaves of a node, which is reached by `way`.

    By the nodes: to ask the tree library for the way to each leaf takes several times as long.
    """
    kind = spec.type
    if kind is None:
        names.append(way[:-1])
        return
    keys = _keys(kind, spec)
    if spec.num_leaves == spec.num_children == spec.num_nodes - 1:
        # There are leaves alone: most nodes are such, and their children need not be looked at.
        names.extend([f"{way}{key}" for key in keys])
        return
    for key, child in zip(keys, spec.children(), strict=True):
        _enter(child, f"{way}{key}.", names)


def _keys(kind: type, spec: optree.PyTreeSpec) -> Iterable[Any]:
    """Return the keys of a node's children: of a named tuple the names."""
    if issubclass(kind, tuple) and kind is not tuple:
        if optree.is_namedtuple_class(kind):
            return optree.namedtuple_fields(kind)
        if optree.is_structseq_class(kind):
            return optree.structseq_fields(kind)
    return spec.entries()
