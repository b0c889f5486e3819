"""Trees of arrays: any nest of dict, list, tuple, named tuple, dataclass or None with arrays at the leaves.

A bare array is the commonest tree, and never meets the tree library here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import optree

__all__ = ["Spec", "flatten", "flatten_like", "path", "unflatten"]

Spec: TypeAlias = optree.PyTreeSpec | None
"""The shape of a tree; None is a bare leaf."""

NAMESPACE = "xferlib"
NUMPY = {np.ndarray}
_bare: set[type] = {np.ndarray}
"""Types that were leaves by themselves."""
_registering = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Return the leaves, in a fixed order, and what `unflatten` needs."""
    if type(tree) in _bare:
        return [tree], None
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    kinds = set(map(type, leaves))
    if kinds != NUMPY:
        # One of each type is looked at: there may be hundreds of leaves.
        records = {kind for kind, leaf in dict(zip(map(type, leaves), leaves, strict=True)).items() if _is_record(leaf)}
        if records:
            _register(records)
            return flatten(tree)
    if not spec.is_leaf():
        return leaves, spec
    _bare.add(type(tree))
    return leaves, None


def flatten_like(spec: Spec, tree: Any, *, name: str) -> list[Any]:
    """Return the leaves of a tree that must have this shape. Raises `ValueError`, naming the argument."""
    leaves, other = flatten(tree)
    if other != spec:
        raise ValueError(f"{name} has another structure: expected {_shown(spec)}, got {_shown(other)}")
    return leaves


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Build the tree again from other leaves."""
    if spec is None:
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(spec, leaves)


def path(spec: Spec, index: int) -> str:
    """Say in words where a leaf stands, for an error."""
    if spec is None:
        return "the array itself"
    return "tree" + "".join(f"[{part!r}]" if not isinstance(part, str) else f".{part}" for part in spec.paths()[index])


def _shown(spec: Spec) -> str:
    return "one array" if spec is None else str(spec)


def _is_record(leaf: Any) -> bool:
    # A framework's array may be a dataclass as well; it is no nest of arrays for that.
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not hasattr(leaf, "dtype")


def _register(classes: set[type]) -> None:
    with _registering:
        for cls in classes - _registered:
            optree.register_pytree_node(cls, _fields, _rebuild, namespace=NAMESPACE)
            _registered.add(cls)


def _fields(instance: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    names = tuple(field.name for field in dataclasses.fields(instance))
    return [getattr(instance, name) for name in names], type(instance), names


def _rebuild(cls: Any, values: Iterable[Any]) -> Any:
    # Not through the constructor: what it checks or derives was written for the arrays that the caller had.
    instance = object.__new__(cls)
    for field, value in zip(dataclasses.fields(cls), values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance
