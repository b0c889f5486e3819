"""Comparing trees, as JAX and the tests' own dataclasses take them apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from xferlib.conformance.values import assert_same

__all__ = ["device_tree", "same"]


def device_tree(tree: Any) -> Any:
    """Put a tree by JAX itself."""
    import jax

    return jax.tree.map(jax.device_put, tree)


def same(found: Any, expected: Any, kind: type) -> None:
    """Assert that two trees are of the same classes and parts, with arrays of this kind at the leaves of the first."""
    if isinstance(expected, np.ndarray) or hasattr(expected, "unsafe_buffer_pointer"):
        assert isinstance(found, kind)
        assert_same(np.asarray(found), np.asarray(expected))
        return
    assert type(found) is type(expected)
    left, right = parts(found), parts(expected)
    if not right:
        assert found == expected or not left
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        same(one, other, kind)


def parts(node: Any) -> list[Any]:
    if dataclasses.is_dataclass(node):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    if hasattr(node, "items"):
        return [part for item in sorted(node.items(), key=repr_of_key) for part in item]
    if isinstance(node, str) or not hasattr(node, "__iter__"):
        return list(getattr(node, "parts", ())) or [part for part in (getattr(node, "value", None),) if part is not None]
    return list(node)


def repr_of_key(item: tuple[Any, Any]) -> str:
    return repr(item[0])
