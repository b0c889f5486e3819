"""Trees as JAX sees them, for the core to take apart; and dataclasses that JAX does not know, where JAX takes trees apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax

from xferlib.protocol import TakenApart
from xferlib.tree import is_record

__all__ = ["put_together", "take_apart", "with_records", "without_records"]


def take_apart(node: Any) -> TakenApart | None:
    """See `xferlib.protocol.TakesTreesApart`."""
    if jax.tree_util.all_leaves((node,)):
        return None
    # JAX asks about the node itself first.
    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    return TakenApart([child for _, child in found], structure, [_name(path[0]) for path, _ in found])


def put_together(structure: Any, children: Sequence[Any]) -> Any:
    """See `xferlib.protocol.TakesTreesApart`."""
    return jax.tree_util.tree_unflatten(structure, children)


def _name(key: Any) -> Any:
    """Return what names a part in an error: JAX has a class for each kind of key, and programs may have more."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


@final
@jax.tree_util.register_pytree_with_keys_class
class _Record:
    """A plain dataclass's fields, as JAX takes a class apart."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keyed = [(jax.tree_util.GetAttrKey(name), value) for name, value in self.fields.items()]
        return keyed, (self.kind, tuple(self.fields))

    @classmethod
    def tree_unflatten(cls, structure: Any, values: Sequence[Any]) -> _Record:
        kind, names = structure
        return cls(kind, dict(zip(names, values, strict=True)))


def with_records(tree: Any) -> Any:
    """Return a tree in which JAX finds the contents of dataclasses, whether these are registered with it or not."""
    leaves = jax.tree.leaves(tree)
    # By their types first: mostly there are few, and none of them is a dataclass.
    if not any(map(dataclasses.is_dataclass, set(map(type, leaves)))) or not any(map(is_record, leaves)):
        return tree
    return jax.tree.map(_recorded, tree)


def without_records(tree: Any) -> Any:
    """Undo `with_records`."""
    return jax.tree.map(_made, tree, is_leaf=_is_recorded)


def _recorded(leaf: Any) -> Any:
    if not is_record(leaf):
        return leaf
    return _Record(type(leaf), {field.name: with_records(getattr(leaf, field.name)) for field in dataclasses.fields(leaf)})


def _made(node: Any) -> Any:
    if not isinstance(node, _Record):
        return node
    # Not through the constructor: what it checks or derives was written for the arrays that the caller had.
    instance: Any = object.__new__(node.kind)
    for name, value in node.fields.items():
        object.__setattr__(instance, name, without_records(value))
    return instance


def _is_recorded(node: Any) -> bool:
    return isinstance(node, _Record)
