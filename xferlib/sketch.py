"""Trees in a few words, for a repr: at any moment, on any thread, of any size.

Nothing here takes a tree apart by the tree library, registers a class, calls a `__repr__` of somebody else's, or looks at an
element of an array: shapes and dtypes are all that is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from xferlib.words import in_words

__all__ = ["sketched"]

SHOWN = 4
"""Entries of one node."""
DEEP = 3
LONGEST = 200
"""Characters."""
LOOKED_AT = 1000
"""Leaves. If there are more, the size is not said."""


def sketched(tree: Any) -> str:
    """Return the shapes and dtypes of a tree, and its bytes: "{'x': float32[128, 3]}, 1.5 KiB". Raises nothing."""
    try:
        text = _words(tree, DEEP)
        nbytes = _nbytes(tree)
    except Exception:
        # Objects of strangers are asked for their shapes here.
        return type(tree).__qualname__[:LONGEST]
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return text if nbytes is None else f"{text}, {in_words(nbytes)}"


def _words(node: Any, depth: int) -> str:
    if _is_array(node):
        return f"{_cut(str(node.dtype))}{_shape(node)}"
    children = _children(node)
    if children is None:
        return "None" if node is None else _cut(type(node).__qualname__)
    if not depth:
        return "..."
    shown = [f"{key}{_words(child, depth - 1)}" for key, child in islice(children, SHOWN)]
    left = _length(node) - len(shown)
    if left > 0:
        shown.append(f"{left} more")
    opening, closing = "{}" if isinstance(node, Mapping) else "[]" if isinstance(node, list) else "()"
    name = "" if type(node) in (dict, list, tuple) else _cut(type(node).__qualname__)
    return f"{name}{opening}{', '.join(shown)}{closing}"


def _shape(array: Any) -> str:
    shape = tuple(array.shape)
    more = ", ..." if len(shape) > 2 * SHOWN else ""
    return f"[{', '.join(map(str, shape[: 2 * SHOWN]))}{more}]"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _key(key: object) -> str:
    return _cut(repr(key)) if type(key) in (str, int, bool) else _cut(type(key).__qualname__)


def _children(node: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the entries of a node, with what stands before each; None for a leaf."""
    if isinstance(node, Mapping):
        return ((f"{_key(key)}: ", value) for key, value in node.items())
    if isinstance(node, (list, tuple)):
        names = getattr(node, "_fields", None)
        return (("" if names is None else f"{names[at]}=", value) for at, value in enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return ((f"{field.name}=", getattr(node, field.name)) for field in dataclasses.fields(node))
    return None


def _length(node: Any) -> int:
    return len(dataclasses.fields(node)) if dataclasses.is_dataclass(node) else len(node)


def _is_array(node: Any) -> bool:
    return hasattr(node, "dtype") and hasattr(node, "shape")


def _nbytes(tree: Any) -> int | None:
    """Return the bytes of the arrays; None if they cannot be known, or there are too many to ask."""
    total, asked, nodes = 0, 0, [tree]
    while nodes:
        node = nodes.pop()
        asked += 1
        if asked > LOOKED_AT:
            return None
        children = None if _is_array(node) else _children(node)
        if children is not None:
            nodes += [child for _, child in islice(children, LOOKED_AT)]
        elif _is_array(node):
            total += math.prod(node.shape) * int(node.dtype.itemsize)
    return total
