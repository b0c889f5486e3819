"""Trees: every kind of node comes back as it was, and errors say where."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest

import xferlib
from tests.core.fakes import on_thread
from xferlib.protocol import TakenApart
from xferlib.tree import PLAIN, flatten, flatten_like, path, trees_of, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    label: Any = None


@dataclass
class Strict:
    values: Any
    total: Any = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray):
            raise TypeError("made for NumPy only")
        self.total = self.values.sum()


A, B, C = np.zeros(1), np.ones(2), np.full(3, 2.0)


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        (A, 1),
        ([A, B], 2),
        ((A, [B, (C,)]), 3),
        ({"z": A, "a": B}, 2),
        (OrderedDict(z=A, a=B), 2),
        (Pair(A, {"k": B}), 2),
        (Frozen(A, Frozen(B)), 2),
        ({"a": None, "b": [None, A]}, 1),
        ({1: A, "one": B}, 2),
        (None, 0),
        ([], 0),
        ({"a": {}}, 0),
    ],
)
def test_trees_come_back_as_they_were(tree: Any, count: int) -> None:
    leaves, spec = flatten(tree)
    assert len(leaves) == count
    again = unflatten(spec, leaves)
    assert type(again) is type(tree)
    assert repr(again) == repr(tree)


def test_dict_keys_keep_their_order() -> None:
    leaves, spec = flatten({"z": A, "a": B, "m": C})
    assert list(unflatten(spec, leaves)) == ["z", "a", "m"]


def test_dicts_match_by_key_whatever_the_order() -> None:
    _, spec = flatten({"z": 1, "a": 2})
    assert dict(zip(["a", "z"], flatten_like(spec, {"a": 4, "z": 3}, name="into"), strict=True)) == {"a": 4, "z": 3}


def test_dataclasses_are_rebuilt_without_their_constructor() -> None:
    leaves, spec = flatten(Strict(A))
    again = unflatten(spec, ["x", "y"])
    assert isinstance(again, Strict)
    assert (again.values, again.total) == ("x", "y")
    assert len(leaves) == 2


def test_a_dataclass_type_is_a_leaf() -> None:
    leaves, spec = flatten(Frozen)
    assert leaves == [Frozen]
    assert spec is None


def test_two_classes_of_the_same_name_are_two() -> None:
    def make() -> Any:
        @dataclass
        class Same:
            x: Any

        return Same

    first, second = make(), make()
    for cls in (first, second):
        leaves, spec = flatten(cls(A))
        assert type(unflatten(spec, leaves)) is cls


def test_a_dataclass_that_another_thread_meets_first_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Fresh:
        x: Any

    register = optree.register_pytree_node
    others: list[Any] = []

    def late(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(optree, "register_pytree_node", register)
        others.append(on_thread(lambda: flatten(Fresh(A))[0]).result(10))
        return register(*arguments, **named)

    monkeypatch.setattr(optree, "register_pytree_node", late)
    leaves, spec = flatten(Fresh(B))
    assert leaves == [B]
    assert others == [[A]]
    assert type(unflatten(spec, leaves)) is Fresh


def test_dataclasses_in_dataclasses_are_taken_apart_the_first_time_they_are_met() -> None:
    @dataclass
    class Inner:
        x: Any

    @dataclass
    class Outer:
        inner: Any
        rest: Any

    leaves, spec = flatten(Outer(Inner(A), [Inner(B), C]))
    assert leaves == [A, B, C]
    again = unflatten(spec, "abc")
    assert again == Outer(Inner("a"), [Inner("b"), "c"])


def test_an_array_of_a_framework_that_is_a_dataclass_is_one_leaf() -> None:
    @dataclass
    class Framework:
        dtype: Any
        shape: Any

    array = Framework(np.dtype(np.int8), (3,))
    leaves, spec = flatten([array, A])
    assert leaves == [array, A]
    assert flatten(array) == ([array], None)
    assert unflatten(spec, leaves) == [array, A]


def test_a_path_says_where_a_leaf_stands() -> None:
    _, spec = flatten({"z": [A, (B, Frozen(C))]})
    assert [path(spec, index) for index in range(3)] == ["tree.z[0]", "tree.z[1][0]", "tree.z[1][1].image"]


def test_another_structure_is_named() -> None:
    _, spec = flatten({"a": A})
    with pytest.raises(ValueError, match=r"out has another structure: expected .*'a'.*, got .*'b'"):
        flatten_like(spec, {"b": A}, name="out")
    with pytest.raises(ValueError, match="got one array"):
        flatten_like(spec, A, name="out")


@pytest.mark.parametrize("empty", [[], {}, None])
def test_an_empty_tree_is_not_called_one_array(empty: object) -> None:
    _, spec = flatten({"a": A})
    with pytest.raises(ValueError, match="another structure") as caught:
        flatten_like(spec, empty, name="into")
    assert "got one array" not in str(caught.value)


def test_a_put_and_a_get_keep_the_tree(stager: xferlib.Stager) -> None:
    old_style = namedtuple("old_style", "x y")  # both kinds of named tuple are nodes
    tree = {"z": Frozen(A, None), "a": old_style(B, [C, np.float32(4)]), 3: ()}
    back = stager.get(stager.put(tree).value).value
    assert list(back) == ["z", "a", 3]
    assert isinstance(back["z"], Frozen)
    assert back["z"].label is None
    assert type(back["a"]) is old_style
    assert back["a"].y[0].tolist() == C.tolist()
    assert back["a"].y[1] == 4
    assert back[3] == ()


def test_an_error_says_where_in_the_tree(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match=r"got builtins\.str") as caught:
        stager.put({"good": A, "bad": [B, "text"]})
    assert caught.value.__notes__ == ["at tree.bad[1]"]


def test_a_finalizer_that_meets_the_registry_of_classes_is_refused_and_hangs_nobody(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree library holds a lock while it learns a class, and the collector may run inside."""

    @dataclass
    class Outer:
        x: Any

    @dataclass
    class Inner:
        x: Any

    outcome: list[str] = []
    learn = optree.register_pytree_node

    def learn_and_collect(cls: type, *arguments: Any, **options: Any) -> Any:
        if cls is Outer:
            try:
                stager.put(Inner(A))
            except xferlib.CapabilityError as error:
                outcome.append(str(error))
        return learn(cls, *arguments, **options)

    monkeypatch.setattr(optree, "register_pytree_node", learn_and_collect)
    assert stager.put(Outer(A)).result().x.tolist() == A.tolist()
    assert len(outcome) == 1
    assert "Inner is new, and a finalizer" in outcome[0]
    assert stager.put(Inner(A)).result().x.tolist() == A.tolist()


def test_a_class_that_two_threads_learn_at_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Met:
        x: Any

    learn = optree.register_pytree_node
    others: list[Any] = []

    def learn_second(cls: type, *arguments: Any, **options: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=lambda: others.append(flatten(Met(B))[0])))
            others[0].start()
            others[0].join()
        return learn(cls, *arguments, **options)

    monkeypatch.setattr(optree, "register_pytree_node", learn_second)
    leaves, spec = flatten(Met(A))
    assert leaves == [A]
    assert others[1] == [B]
    assert isinstance(unflatten(spec, [C]), Met)


class Opaque:
    """What only a framework takes apart."""

    def __init__(self, *parts: Any, label: str = "") -> None:
        self.parts, self.label = parts, label


class Registry:
    """A backend's, for what a framework knows."""

    name = "framework"

    @staticmethod
    def take_apart(node: Any) -> TakenApart | None:
        return TakenApart(node.parts, node.label, ["first", 1][: len(node.parts)]) if isinstance(node, Opaque) else None

    @staticmethod
    def put_together(structure: Any, children: Any) -> Any:
        return Opaque(*children, label=structure)


def test_a_backend_brings_trees_of_its_own() -> None:
    trees = trees_of(Registry())  # type: ignore[arg-type]  # All that is asked of it.
    assert trees_of(Registry()) is trees  # type: ignore[arg-type]
    leaves, spec = trees.flatten({"z": Opaque(A, Frozen(B, Opaque(C, label="inner")), label="outer"), "a": None})
    assert all(found is expected for found, expected in zip(leaves, (A, B, C), strict=True))
    assert [path(spec, index) for index in range(3)] == ["tree.z.first", "tree.z[1].image", "tree.z[1].label.first"]
    again = unflatten(spec, [1, 2, 3])
    assert (again["z"].label, again["z"].parts[0], again["z"].parts[1].label.parts) == ("outer", 1, (3,))
    assert trees.flatten_like(spec, again, name="out") == [1, 2, 3]
    again["z"].label = "other"
    with pytest.raises(ValueError, match="out has another structure"):
        trees.flatten_like(spec, again, name="out")


def test_trees_of_one_backend_are_leaves_to_the_others(stager: xferlib.Stager) -> None:
    trees = trees_of(Registry())  # type: ignore[arg-type]
    assert len(trees.flatten([Opaque(A, B)])[0]) == 2
    assert trees_of(stager.backend) is PLAIN
    (leaf,), spec = flatten(Opaque(A, B))
    assert isinstance(leaf, Opaque)
    assert spec is None
