"""Trees of arrays: any nest of dict, list, tuple, named tuple, dataclass or None with arrays at the leaves.

A backend whose framework knows more trees brings them: see `TakesTreesApart`. A dataclass that the framework knows is taken apart
as the framework does. A bare array is the commonest tree, and never meets the tree library here.

What belongs to a batch and is no array (names, ids, numbers, times) rides along: it stays where it is in the tree, untouched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, final
from uuid import UUID

import numpy as np
import optree

from xferlib.errors import CapabilityError
from xferlib.protocol import DescribesArrays, HostStager, TakesTreesApart

__all__ = [
    "NUMPY",
    "PLAIN",
    "RIDERS",
    "Host",
    "Mixed",
    "ShapeDtype",
    "Spec",
    "Trees",
    "check_structure",
    "is_record",
    "note_place",
    "path",
    "rides_along",
    "trees_of",
    "unflatten",
    "with_riders",
]

T = TypeVar("T")


@final
class Host(Generic[T]):
    """What stays on the host: in a tree that is put, or that a loop takes, it rides along, whatever its `value` is.

    So do text and numbers by themselves; this is for arrays that the device has no use for, and for whatever else belongs to a
    batch. It comes out where it stood, as the same object, and nothing looks into it.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Host({self.value!r})"


NUMPY: set[type] = {np.ndarray}
STRINGS: set[type] = {str}
SHOWN = 16
"""Entries of one node, in an error."""
FLAT_SHAPES = 256
"""How many shapes of trees without nests are remembered."""
RIDERS = (str, bytes, int, float, complex, date, time, timedelta, Decimal, Fraction, Enum, PurePath, UUID, Host)
"""Types that are no arrays. NumPy's own numbers are arrays, though some of them are Python's numbers as well; its text is text."""


class Mixed(NamedTuple):
    """The shape of a tree in which some leaves ride along."""

    spec: optree.PyTreeSpec
    riders: dict[int, Any]
    """By their numbers among all leaves."""


ShapeDtype: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and the dtype of an array."""
Spec: TypeAlias = optree.PyTreeSpec | Mixed | None
"""The shape of a tree; None is a bare leaf."""


@final
class Trees:
    """The trees that go through one backend's stagers, and what their arrays are. Any thread, also inside finalizers.

    Classes are registered with the tree library as they come, each in the namespace of the backend that brought them.
    """

    def __init__(self, namespace: str, framework: TakesTreesApart | None = None, arrays_of: DescribesArrays | None = None) -> None:
        self.namespace = namespace
        # Only its functions: the backend itself would be kept for the whole process.
        self._take_apart = None if framework is None else framework.take_apart
        self._put_together = None if framework is None else framework.put_together
        self._describe = None if arrays_of is None else arrays_of.describe
        self.describe: Callable[[Any], ShapeDtype | None] = _by_numpy if arrays_of is None else self._by_backend
        """Returns shape and dtype of an array; None for what is none."""
        self.bare: set[type] = {np.ndarray, str, bytes, bool, int, float, complex, Host}
        """Types that are leaves, as far as it is known."""
        self._flat: dict[object, tuple[optree.PyTreeSpec, Callable[[Any], Iterable[Any]]]] = {}
        """Of dicts, lists and tuples of leaves: their shapes, and what takes their leaves out in order. By their keys, or by type
        and length."""

    def _by_backend(self, array: Any) -> ShapeDtype | None:
        assert self._describe is not None
        return self._describe(array) or _by_numpy(array)

    def flatten(self, tree: Any) -> tuple[list[Any], optree.PyTreeSpec | None]:
        """Return the leaves, in a fixed order, and what `unflatten` needs."""
        leaves, spec, _ = self._taken_apart(tree)
        return leaves, spec

    def arrays(self, tree: Any) -> tuple[list[Any], Spec]:
        """Return the leaves that do not ride along, in a fixed order, and what `unflatten` needs."""
        leaves, spec, kinds = self._taken_apart(tree)
        if spec is None or kinds == NUMPY or not any(map(rides_along, kinds)):
            return leaves, spec
        riders = {index: leaf for index, leaf in enumerate(leaves) if rides_along(type(leaf))}
        return [leaf for index, leaf in enumerate(leaves) if index not in riders], Mixed(spec, riders)

    def flatten_like(self, spec: Spec, tree: Any, *, name: str) -> list[Any]:
        """Return the arrays of a tree that must have this shape; what rides along may differ. Raises `ValueError`, naming it."""
        leaves, other = self.arrays(tree)
        check_structure(spec, other, name=name)
        return leaves

    def _taken_apart(self, tree: Any) -> tuple[list[Any], optree.PyTreeSpec | None, set[type]]:
        """Return the leaves, the shape, and the types of the leaves."""
        kind = type(tree)
        if kind in self.bare:
            return [tree], None, NUMPY
        if kind is dict or kind is list or kind is tuple:
            taken = self._taken_flat(tree, kind)
            if taken is not None:
                return taken
        leaves, spec = optree.tree_flatten(tree, namespace=self.namespace)
        kinds = set(map(type, leaves))
        if kinds != NUMPY and not kinds <= self.bare and self._learn(leaves):
            return self._taken_apart(tree)
        return leaves, None if spec.is_leaf() else spec, kinds

    def _taken_flat(self, tree: Any, kind: type) -> tuple[list[Any], optree.PyTreeSpec, set[type]] | None:
        """Return the same for a tree without nests, as most are; None where it may have some.

        The tree library would take as long for hundreds of leaves as all else that is done for them on the host.
        """
        if not tree:
            return None
        if kind is dict:
            key: object = tuple(tree)
            kinds = set(map(type, tree.values()))
            # Keys of other types may be equal without being the same, such as 1 and True.
            if not kinds <= self.bare or set(map(type, tree)) != STRINGS:
                return None
        else:
            key = kind, len(tree)
            kinds = set(map(type, tree))
            if not kinds <= self.bare:
                return None
        known = self._flat.get(key)
        if known is None:
            spec = optree.tree_structure(tree, namespace=self.namespace)
            names = spec.entries()
            known = spec, list if kind is not dict else itemgetter(*names) if len(names) > 1 else dict.values
            if len(self._flat) >= FLAT_SHAPES:
                self._flat.clear()
            self._flat[key] = known
        spec, take = known
        return list(take(tree)), spec, kinds

    def _learn(self, leaves: list[Any]) -> bool:
        """Look at leaves of types that are not known, one of each: there may be hundreds. Tell whether any can be taken apart.

        This is also true for a type that another thread has registered since they were flattened.
        """
        found = False
        for kind, leaf in dict(zip(map(type, leaves), leaves, strict=True)).items():
            if kind in self.bare:
                continue
            if self._take_apart is not None and self._put_together is not None and self._take_apart(leaf) is not None:
                self._register(kind, self._take_apart, self._put_together)
                found = True
            elif self._describe is not None and self._describe(leaf) is not None:
                self.bare.add(kind)
            elif is_record(leaf):
                self._register(kind, _fields, _rebuild)
                found = True
            elif hasattr(leaf, "dtype"):
                # Other classes may still be registered with the framework later.
                self.bare.add(kind)
        return found

    def _register(self, kind: type, apart: Callable[[Any], Any], together: Callable[[Any, Any], Any]) -> None:
        thread = threading.get_ident()
        if thread in _registering:
            # The tree library holds a lock meanwhile: this thread would wait for itself.
            raise CapabilityError(
                f"{kind.__qualname__} is new, and a finalizer that the garbage collector runs while another class is being "
                "learned cannot transfer it. Transfer it from ordinary code, or once before"
            )
        try:
            _registering[thread] = None
            # Raised if another thread has registered it in between.
            with suppress(ValueError):
                optree.register_pytree_node(kind, apart, together, namespace=self.namespace)
        finally:
            _registering.pop(thread, None)


def _by_numpy(array: Any) -> ShapeDtype | None:
    try:
        return tuple(array.shape), np.dtype(array.dtype)
    except (AttributeError, TypeError):
        return None


_registering: dict[int, None] = {}
"""The threads that are inside the tree library's registry."""
PLAIN = Trees("xferlib")
"""The trees of backends that bring none of their own."""
_by_namespace: dict[str, Trees] = {PLAIN.namespace: PLAIN}


def trees_of(backend: HostStager[Any]) -> Trees:
    """Return the `Trees` for a backend's stagers."""
    framework = cast("TakesTreesApart", backend) if hasattr(backend, "take_apart") else None
    arrays_of = cast("DescribesArrays", backend) if hasattr(backend, "describe") else None
    if framework is None and arrays_of is None:
        return PLAIN
    namespace = f"{PLAIN.namespace}.{backend.name}"
    return _by_namespace.get(namespace) or _by_namespace.setdefault(namespace, Trees(namespace, framework, arrays_of))


def rides_along(kind: type) -> bool:
    """Tell whether leaves of a type stay where they are in a tree that is put or got."""
    return issubclass(kind, RIDERS) and not issubclass(kind, np.number)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Build the tree again from other leaves."""
    if spec is None:
        (leaf,) = leaves
        return leaf
    if isinstance(spec, Mixed):
        spec, riders = spec
        given = iter(leaves)
        leaves = [riders[index] if index in riders else next(given) for index in range(spec.num_leaves)]
    return optree.tree_unflatten(spec, leaves)


def with_riders(spec: Spec, riders: Iterable[Any]) -> Spec:
    """Return the same shape with other values for what rides along, in order."""
    return Mixed(spec.spec, dict(zip(spec.riders, riders, strict=True))) if isinstance(spec, Mixed) else spec


def check_structure(spec: Spec, other: Spec, *, name: str) -> None:
    """Raise `ValueError`, naming the argument, unless two trees have the same shape, with riders at the same places."""
    if _shape_of(other) != _shape_of(spec):
        expected, got, advice = _shown(spec), _shown(other), ""
        if expected == got:
            advice = ". What differs is not shown: entries further on, classes of one name, or what these have beside their arrays"
        elif isinstance(spec, Mixed) or isinstance(other, Mixed):
            advice = ". Where one has text or a number, which is no array, the other needs some, too"
        raise ValueError(f"{name} has another structure: expected {expected}, got {got}{advice}")


def path(spec: Spec, index: int) -> str:
    """Say in words where an array stands, for an error."""
    if spec is None:
        return "the array itself"
    if isinstance(spec, Mixed):
        spec, riders = spec
        index = [number for number in range(spec.num_leaves) if number not in riders][index]
    return _place(spec, index)


def note_place(error: Exception, spec: Spec, index: int) -> None:
    """Note with an error where in a tree the array stands. One that is no tree's needs no note."""
    if spec is not None:
        error.add_note(f"at {path(spec, index)}")


def _place(spec: optree.PyTreeSpec, index: int) -> str:
    return "tree" + "".join(f"[{part!r}]" if not isinstance(part, str) else f".{part}" for part in spec.paths()[index])


def _shape_of(spec: Spec) -> object:
    return (spec.spec, spec.riders.keys()) if isinstance(spec, Mixed) else spec


def _shown(spec: Spec) -> str:
    if spec is None:
        return "one array"
    whole, riders = spec if isinstance(spec, Mixed) else (spec, {})
    return _in_words(whole, iter(["no array" if index in riders else "array" for index in range(whole.num_leaves)]))


def _in_words(spec: optree.PyTreeSpec, leaves: Iterator[str]) -> str:
    """Say what a tree is made of: "{'image': array, 'name': no array}". `leaves`: the words for each."""
    if spec.is_leaf():
        return next(leaves)
    kind: Any = spec.type
    if kind is type(None):
        return "None"
    children = [_in_words(child, leaves) for child in spec.children()]
    names = getattr(kind, "_fields", spec.entries())
    if issubclass(kind, dict):
        children = [f"{key!r}: {child}" for key, child in zip(names, children, strict=True)]
    elif kind not in (list, tuple):
        children = [f"{name}={child}" if isinstance(name, str) else child for name, child in zip(names, children, strict=True)]
    left = len(children) - SHOWN
    shown = ", ".join(children if left <= 0 else [*children[:SHOWN], f"{left} more"])
    if kind is tuple and len(children) == 1:
        shown += ","
    opening, closing = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}.get(kind, (f"{kind.__qualname__}(", ")"))
    return f"{opening}{shown}{closing}"


def is_record(leaf: Any) -> bool:
    """Tell whether a leaf is a dataclass whose fields are a tree of their own."""
    # A framework's array may be a dataclass as well, but that does not make it a nest of arrays.
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    return not hasattr(leaf, "dtype") and not rides_along(type(leaf))


def _fields(instance: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    names = tuple(field.name for field in dataclasses.fields(instance))
    return [getattr(instance, name) for name in names], type(instance), names


def _rebuild(cls: Any, values: Iterable[Any]) -> Any:
    # Not through the constructor: what it checks or derives was written for the arrays that the caller had.
    instance = object.__new__(cls)
    for field, value in zip(dataclasses.fields(cls), values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance
