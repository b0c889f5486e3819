"""Trees: every kind of node comes back as it was, and errors say where."""

from __future__ import annotations

import array
import datetime
import pathlib
import pickle
import threading
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread
from xferlib.protocol import TakenApart
from xferlib.tree import FLAT_SHAPES, PLAIN, Host, Trees, path, trees_of, unflatten


class Colour(Enum):
    RED = 1


@dataclass
class Fields:
    mass: float
    radius: float


@dataclass(init=False)
class Day(datetime.date):
    """A dataclass, and a day all the same."""


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
    leaves, spec = PLAIN.flatten(tree)
    assert len(leaves) == count
    again = unflatten(spec, leaves)
    assert type(again) is type(tree)
    assert repr(again) == repr(tree)


RIDERS: tuple[Any, ...] = (
    "name",
    b"bytes",
    np.str_("name"),
    np.bytes_(b"bytes"),
    7,
    True,
    1.5,
    2j,
    datetime.date(2000, 1, 2),
    datetime.datetime(2000, 1, 2),
    datetime.time(3),
    datetime.timedelta(4),
    Decimal(5),
    Fraction(6, 7),
    Colour.RED,
    pathlib.Path("a"),
    uuid.UUID(int=8),
    Host(np.arange(3)),
)


@pytest.mark.parametrize("rider", RIDERS, ids=repr)
def test_what_is_no_array_rides_along(rider: Any) -> None:
    tree = {"id": rider, "image": A, "more": [B, rider, (C, {"last": rider})]}
    leaves, spec = PLAIN.arrays(tree)
    assert [id(leaf) for leaf in leaves] == [id(A), id(B), id(C)]
    again = unflatten(spec, "abc")
    assert again == {"id": rider, "image": "a", "more": ["b", rider, ("c", {"last": rider})]}
    assert again["id"] is rider
    assert [path(spec, index) for index in range(3)] == ["tree.image", "tree.more[0]", "tree.more[2][0]"]


@pytest.mark.parametrize(
    "leaf",
    [np.float64(1), np.bool_(True), np.int32(1), memoryview(b"x"), bytearray(b"x"), {1}, object(), array.array("b")],
    ids=repr,
)
def test_what_is_an_array_or_may_hold_one_does_not_ride_along(leaf: Any) -> None:
    leaves, _ = PLAIN.arrays([A, leaf])
    assert leaves == [A, leaf]


def test_what_stays_on_the_host_stays_the_same_object_through_every_loop(stager: xferlib.Stager) -> None:
    texts = xferlib.Host(np.array(["a", "b"]))
    batches = [{"x": np.full(4, number), "texts": texts} for number in range(3)]
    loops = (
        xferlib.prefetch(iter(batches), stager),
        xferlib.stream_map(lambda batch: batch, batches, stager),
        xferlib.drain([stager.put(batch).value for batch in batches], stager),
    )
    for loop in loops:
        assert [(int(batch["x"][0]), batch["texts"] is texts) for batch in loop] == [(number, True) for number in range(3)]
    assert texts.value.tolist() == ["a", "b"]


def test_what_stays_on_the_host_may_be_pickled_and_has_no_place_in_a_file(stager: xferlib.Stager, tmp_path: pathlib.Path) -> None:
    again = pickle.loads(pickle.dumps(xferlib.Host("text")))
    assert (type(again), again.value, repr(again)) == (xferlib.Host, "text", "Host('text')")
    with pytest.raises(TypeError, match="'more' is a Host, and a file has a place for"):
        xferlib.save(tmp_path / "a.safetensors", {"x": np.ones(3), "more": again}, stager)


def test_an_array_alone_and_what_is_none_are_told_as_they_are() -> None:
    for tree in (A, "text", 3):
        assert PLAIN.arrays(tree) == ([tree], None)
    assert PLAIN.arrays(["text", 3])[0] == []


def test_riders_may_differ_from_tree_to_tree_and_their_places_may_not() -> None:
    _, spec = PLAIN.arrays({"image": A, "name": "first"})
    assert PLAIN.flatten_like(spec, {"image": B, "name": "second"}, name="into") == [B]
    for other in ({"image": B, "name": C}, {"image": "text", "name": B}, {"image": B}, B, {"image": "x", "name": "y"}):
        with pytest.raises(
            ValueError, match=r"structure: expected {'image': array, 'name': no array}, got .* the other needs some, too"
        ):
            PLAIN.flatten_like(spec, other, name="into")
    _, plain = PLAIN.arrays({"image": A, "name": B})
    with pytest.raises(ValueError, match="into has another structure"):
        PLAIN.flatten_like(plain, {"image": A, "name": "text"}, name="into")


@pytest.mark.parametrize("debug", [False, True])
def test_a_batch_goes_to_the_device_and_back_with_its_names(debug: bool) -> None:
    batch: dict[str, Any] = {
        "image": np.arange(6.0).reshape(2, 3),
        "name": ["a.png", "b.png"],
        "label": np.array([1, 2]),
        "step": 7,
    }
    with xferlib.stager("host", debug=debug) as stager:
        there = stager.put(batch).value
        assert there["name"] is not batch["name"]
        assert (there["name"], there["step"]) == (["a.png", "b.png"], 7)
        back = stager.get(there).value
        out: dict[str, Any] = {"image": np.zeros((2, 3)), "name": ["", ""], "label": np.zeros(2, int), "step": 0}
        assert stager.get(there, out=out).value is out
        into = stager.put(out | {"image": np.zeros((2, 3))}).value
        assert stager.put(batch, into=into).value is into
        into = stager.get(into).value
    for found in (back, out, into):
        assert np.array_equal(found["image"], batch["image"])
        assert np.array_equal(found["label"], batch["label"])
    assert (back["name"], back["step"]) == (["a.png", "b.png"], 7)
    # Only arrays are written to.
    assert out["name"] == ["", ""]


def test_many_arrays_are_put_with_a_name_among_them() -> None:
    tree: list[Any] = [np.full(3, number) for number in range(40)]
    tree.insert(17, "name")
    with xferlib.stager("host") as stager:
        back = stager.get(stager.put(tree).value).value
    assert back.pop(17) == "name"
    assert [array.tolist() for array in back] == [[number] * 3 for number in range(40)]


def test_debug_mode_watches_the_sources_of_a_batch_with_names() -> None:
    with xferlib.stager("host", debug=True) as stager:
        source = stager.empty_pinned(1000, np.uint8)
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # The host's.
            transfer = stager.put({"name": "x", "x": source})
            source[:] = 1
        with pytest.raises(xferlib.SourceRewrittenError, match=r"tree\.x"):
            transfer.synchronize()


class Planet(Fields, Enum):
    """As the documentation of enumerations has it."""

    EARTH = 5.9, 6.3


def test_a_member_of_an_enumeration_is_itself_though_it_has_fields() -> None:
    with xferlib.stager("host") as stager:
        there = stager.put({"x": A, "planet": Planet.EARTH, "day": Day(2000, 1, 2)}).value
    assert there["planet"] is Planet.EARTH
    assert there["day"] == Day(2000, 1, 2)


def test_many_that_are_no_arrays_are_not_all_named() -> None:
    _, spec = PLAIN.arrays([A, *map(str, range(20))])
    with pytest.raises(ValueError, match=r"expected \[array, (no array, ){15}5 more\], got"):
        PLAIN.flatten_like(spec, [A, B], name="out")


def test_names_ride_along_in_slots(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, {"x": ((4, 2), np.uint8)}, slots=2) as ring:

        def slots() -> Iterator[Any]:
            for number in range(5):
                slot = ring.acquire()
                slot["x"][:] = number
                slot.tree["name"] = f"{number}.png"
                slot.rows = 3
                yield slot

        found = [(batch["name"], stager.get(batch["x"]).value.tolist()) for batch in xferlib.prefetch(slots(), stager)]
        assert found == [(f"{number}.png", [[number] * 2] * 3) for number in range(5)]
        slot = ring.acquire()
        slot.tree["name"] = "not put"
        slot.release()
        slot = ring.acquire()
        assert list(slot.tree) == ["x"]


def test_names_ride_along_into_the_rows_of_one_array(stager: xferlib.Stager) -> None:
    out: dict[str, Any] = {"x": np.zeros((6, 2)), "name": None, "number": 0}
    results = [stager.put({"x": np.full((2, 2), number), "name": None, "number": number}).value for number in (1.0, 2.0, 3.0)]
    with xferlib.drain(results, stager, out=out) as drained:
        found = [(result["number"], result["x"].tolist()) for result in drained]
    assert found == [(number, [[number] * 2] * 2) for number in (1.0, 2.0, 3.0)]
    assert out["x"].tolist() == [[1.0] * 2] * 2 + [[2.0] * 2] * 2 + [[3.0] * 2] * 2
    assert out["number"] == 0
    with (
        xferlib.drain(results, stager, out={"x": np.zeros((6, 2))}) as drained,
        pytest.raises(ValueError, match="another structure"),
    ):
        next(drained)


def test_names_ride_along_a_pipeline(stager: xferlib.Stager) -> None:
    batches = ({"image": np.full(9, number), "name": f"{number}.png"} for number in range(4))
    results = xferlib.stream_map(lambda batch: {"twice": batch["image"] * 2, "name": batch["name"]}, batches, stager)
    assert [(int(result["twice"][0]), result["name"]) for result in results] == [
        (0, "0.png"),
        (2, "1.png"),
        (4, "2.png"),
        (6, "3.png"),
    ]


def test_a_class_that_another_thread_learns_in_between_is_taken_apart_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Batch:
        image: Any

    trees = Trees("learned by two")
    learn = trees._learn

    def after_another(leaves: list[Any]) -> bool:
        monkeypatch.setattr(trees, "_learn", learn)
        assert on_thread(lambda: learn(leaves)).result(WATCHDOG)
        return learn(leaves)

    monkeypatch.setattr(trees, "_learn", after_another)
    image = np.arange(3)
    leaves, spec = trees.flatten(Batch(image))
    assert len(leaves) == 1
    assert leaves[0] is image
    assert unflatten(spec, leaves).image is image


def test_dict_keys_keep_their_order() -> None:
    leaves, spec = PLAIN.flatten({"z": A, "a": B, "m": C})
    assert list(unflatten(spec, leaves)) == ["z", "a", "m"]


def test_dicts_match_by_key_whatever_the_order() -> None:
    _, spec = PLAIN.flatten({"z": A, "a": B})
    assert dict(zip(["a", "z"], PLAIN.flatten_like(spec, {"a": C, "z": B}, name="into"), strict=True)) == {"a": C, "z": B}


def test_dataclasses_are_rebuilt_without_their_constructor() -> None:
    leaves, spec = PLAIN.flatten(Strict(A))
    again = unflatten(spec, ["x", "y"])
    assert isinstance(again, Strict)
    assert (again.values, again.total) == ("x", "y")
    assert len(leaves) == 2


def test_a_dataclass_type_is_a_leaf() -> None:
    leaves, spec = PLAIN.flatten(Frozen)
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
        leaves, spec = PLAIN.flatten(cls(A))
        assert type(unflatten(spec, leaves)) is cls


def test_a_dataclass_that_another_thread_meets_first_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Fresh:
        x: Any

    register = optree.register_pytree_node
    others: list[Any] = []

    def late(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(optree, "register_pytree_node", register)
        others.append(on_thread(lambda: PLAIN.flatten(Fresh(A))[0]).result(10))
        return register(*arguments, **named)

    monkeypatch.setattr(optree, "register_pytree_node", late)
    leaves, spec = PLAIN.flatten(Fresh(B))
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

    leaves, spec = PLAIN.flatten(Outer(Inner(A), [Inner(B), C]))
    assert leaves == [A, B, C]
    again = unflatten(spec, "abc")
    assert again == Outer(Inner("a"), [Inner("b"), "c"])


def test_an_array_of_a_framework_that_is_a_dataclass_is_one_leaf() -> None:
    @dataclass
    class Framework:
        dtype: Any
        shape: Any

    array = Framework(np.dtype(np.int8), (3,))
    leaves, spec = PLAIN.flatten([array, A])
    assert leaves == [array, A]
    assert PLAIN.flatten(array) == ([array], None)
    assert unflatten(spec, leaves) == [array, A]


def test_a_path_says_where_a_leaf_stands() -> None:
    _, spec = PLAIN.flatten({"z": [A, (B, Frozen(C))]})
    assert [path(spec, index) for index in range(3)] == ["tree.z[0]", "tree.z[1][0]", "tree.z[1][1].image"]


def test_another_structure_is_named() -> None:
    _, spec = PLAIN.flatten({"a": A})
    with pytest.raises(ValueError, match=r"^out has another structure: expected {'a': array}, got {'b': array}$"):
        PLAIN.flatten_like(spec, {"b": A}, name="out")
    with pytest.raises(ValueError, match="got one array"):
        PLAIN.flatten_like(spec, A, name="out")


def test_a_structure_is_said_as_it_would_be_written() -> None:
    old_style = namedtuple("old_style", "x y")
    _, spec = PLAIN.arrays({"a": [A, (B,), ()], "b": old_style(A, None), "c": Frozen(A, "text"), "d": OrderedDict(k=(A, B))})
    with pytest.raises(ValueError, match="got one array") as caught:
        PLAIN.flatten_like(spec, A, name="out")
    expected = (
        "{'a': [array, (array,), ()], 'b': old_style(x=array, y=None), 'c': Frozen(image=array, label=no array), "
        "'d': OrderedDict('k': (array, array))}"
    )
    assert str(caught.value).startswith(f"out has another structure: expected {expected}, got one array. Where one has")


def test_structures_that_look_alike_and_are_not_are_said_to_differ() -> None:
    first, second = namedtuple("point", "x"), namedtuple("point", "x")
    _, spec = PLAIN.arrays(first(A))
    with pytest.raises(ValueError, match=r"expected point\(x=array\), got point\(x=array\)\. What differs is not shown"):
        PLAIN.flatten_like(spec, second(A), name="out")


@pytest.mark.parametrize("empty", [[], {}, None])
def test_an_empty_tree_is_not_called_one_array(empty: object) -> None:
    _, spec = PLAIN.flatten({"a": A})
    with pytest.raises(ValueError, match="another structure") as caught:
        PLAIN.flatten_like(spec, empty, name="into")
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
    with pytest.raises(TypeError, match=r"got builtins\.set") as caught:
        stager.put({"good": A, "name": "x", "bad": [B, {1}]})
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
            others.append(threading.Thread(target=lambda: others.append(PLAIN.flatten(Met(B))[0])))
            others[0].start()
            others[0].join()
        return learn(cls, *arguments, **options)

    monkeypatch.setattr(optree, "register_pytree_node", learn_second)
    leaves, spec = PLAIN.flatten(Met(A))
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
    again = unflatten(spec, [C, B, A])
    assert (again["z"].label, again["z"].parts[0], again["z"].parts[1].label.parts) == ("outer", C, (A,))
    assert trees.flatten_like(spec, again, name="out") == [C, B, A]
    again["z"].label = "other"
    with pytest.raises(ValueError, match="out has another structure"):
        trees.flatten_like(spec, again, name="out")


def test_trees_of_one_backend_are_leaves_to_the_others(stager: xferlib.Stager) -> None:
    trees = trees_of(Registry())  # type: ignore[arg-type]
    assert len(trees.flatten([Opaque(A, B)])[0]) == 2
    assert trees_of(stager.backend) is PLAIN
    (leaf,), spec = PLAIN.flatten(Opaque(A, B))
    assert isinstance(leaf, Opaque)
    assert spec is None


def test_a_tree_without_nests_is_what_it_was_whatever_came_before() -> None:
    arrays = [np.zeros(number) for number in range(1, 4)]
    trees: list[Any] = [
        arrays,
        tuple(arrays),
        dict(zip("abc", arrays, strict=True)),
        dict(zip("cba", arrays, strict=True)),
        dict(zip("cba", arrays, strict=True)),
        {1: arrays[0], 0: arrays[1]},
        {True: arrays[0], False: arrays[1]},
        {"one": arrays[0]},
        {"one": [arrays[0]]},
        [arrays],
        {"name": "text", "array": arrays[0]},
        [None, arrays[0]],
    ]
    for tree in trees:
        for _ in range(2):
            leaves, spec = PLAIN.arrays(tree)
            plain, whole = optree.tree_flatten(tree, namespace=PLAIN.namespace)
            plain = [leaf for leaf in plain if isinstance(leaf, np.ndarray)]
            assert len(leaves) == len(plain)
            assert all(leaf is other for leaf, other in zip(leaves, plain, strict=True))
            again = unflatten(spec, leaves)
            assert optree.tree_structure(again, namespace=PLAIN.namespace) == whole
            assert type(again) is type(tree)
            if isinstance(tree, dict):
                assert [(type(key), key) for key in again] == [(type(key), key) for key in tree]


def test_shapes_of_trees_without_nests_are_not_kept_for_ever() -> None:
    trees = Trees("xferlib.tests.flat")
    for length in range(1, 3 * FLAT_SHAPES):
        trees.arrays([np.zeros(1)] * (length % (FLAT_SHAPES + 50)))
        assert len(trees._flat) <= FLAT_SHAPES
