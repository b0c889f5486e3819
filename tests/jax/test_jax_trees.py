"""Trees as JAX sees them: whatever is registered with it goes through transfers, rings and drains, and comes back as it was."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest

import xferlib
from tests.jax.values import device_tree, same
from xferlib.stager import Stager

jax = pytest.importorskip("jax")

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Static:
    """Registered with JAX, with a field that is no array."""

    values: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Node:
    """Registered with JAX, without names of its parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, structure: None, parts: tuple[Any, ...]) -> Node:
        return cls(*parts)


@jax.tree_util.register_pytree_with_keys_class
class Typed:
    """Looks like an array, and is registered with JAX all the same."""

    dtype = np.dtype(np.float32)
    shape = (2, 3)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], str]:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], "typed"

    @classmethod
    def tree_unflatten(cls, structure: str, parts: list[Any]) -> Typed:
        assert structure == "typed"
        return cls(*parts)


@dataclasses.dataclass
class Plain:
    """Unknown to JAX."""

    left: Any
    right: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


TREES = {
    "static field": Static(A, "name"),
    "node": Node(A, [B, None]),
    "no children": [Node(), A],
    "typed": Typed(A),
    "plain": Plain(A),
    "registered inside of plain inside of registered": Node(Plain(Static({"z": A, "a": Node(B)}, "inner"), Pair(A, None)), B),
    "plain inside of a list inside of registered": Static([Plain(A), (B, Plain(None, A))], "outer"),
    "keys that cannot be compared": {1: A, "one": Node(B)},
    "deque": deque([A, Static(B)]),
    "ordered": OrderedDict(z=Static(A), a=B),
}


@pytest.mark.parametrize("name", TREES)
def test_what_jax_takes_apart_is_put_and_comes_back(stager: Stager, name: str) -> None:
    tree = TREES[name]
    array_tree = stager.put(tree).value
    same(array_tree, tree, jax.Array)
    back = stager.get(array_tree).result()
    same(back, tree, np.ndarray)


def test_dicts_keep_their_order(stager: Stager) -> None:
    back = stager.get(stager.put(Node({"z": A, "a": B})).value).result()
    assert list(back.parts[0]) == ["z", "a"]


def test_a_class_that_was_refused_is_taken_once_it_is_registered(stager: Stager) -> None:
    class Late:
        def __init__(self, value: Any) -> None:
            self.value = value

    with pytest.raises(TypeError, match=r"expected a NumPy array, got .*Late"):
        stager.put(Late(A))
    jax.tree_util.register_pytree_node(Late, lambda late: ((late.value,), None), lambda _, parts: Late(*parts))
    assert isinstance(stager.put(Late(A)).value.value, jax.Array)


def test_a_class_that_looks_like_an_array_is_no_leaf_because_another_backend_saw_it_first(stager: Stager) -> None:
    @dataclasses.dataclass
    class Both:
        values: Any
        names: Any

    with xferlib.stager("host") as host:
        with pytest.raises(TypeError, match=r"got builtins\.frozenset"):
            host.put(Both(A, frozenset("a")))
        jax.tree_util.register_dataclass(Both, ["values"], ["names"])
        assert stager.put(Both(A, frozenset("a"))).value.names == {"a"}
        with pytest.raises(TypeError, match=r"got builtins\.frozenset"):
            host.put(Both(A, frozenset("a")))


def test_an_error_says_where_in_the_tree(stager: Stager) -> None:
    for tree, where in (
        (Node(A, {1}), "at tree[1]"),
        (Static([A, {1}]), "at tree.values[1]"),
        (Plain(A, Typed({1})), "at tree.right.value"),
        ({"a": Static({"k": {1}})}, "at tree.a.values.k"),
    ):
        with pytest.raises(TypeError, match=r"got builtins\.set") as caught:
            stager.put(tree)
        assert caught.value.__notes__ == [where]


def test_names_stay_where_they_are(stager: Stager) -> None:
    tree = Node(A, Plain("left", Typed(B)))
    there = stager.put(tree).value
    assert (there.parts[1].left, there.parts[0].shape) == ("left", A.shape)
    back = stager.get(there).value
    assert back.parts[1].left == "left"
    assert np.array_equal(back.parts[1].right.value, B)


def test_out_must_have_the_same_structure(stager: Stager) -> None:
    arrays = stager.put(Static(A, "one")).value
    out = Static(np.zeros_like(A), "one")
    assert stager.get(arrays, out=out).result() is out
    assert (out.values == A).all()
    for other in (Static(np.zeros_like(A), "two"), Plain(np.zeros_like(A)), np.zeros_like(A)):
        with pytest.raises(ValueError, match="out has another structure"):
            stager.get(arrays, out=other)


def test_a_ring_and_a_prefetch_take_them(stager: Stager) -> None:
    spec = Static({"x": Node(((2, 3), np.float32)), "y": Plain(((2,), np.int32))}, "spec")
    with xferlib.Ring(stager, spec) as ring:

        def batches() -> Any:
            for number in range(6):
                slot = ring.acquire()
                slot.tree.values["x"].parts[0][...] = number
                slot.tree.values["y"].left[...] = -number
                if number == 5:
                    slot.rows = 1
                yield slot

        for number, batch in enumerate(xferlib.prefetch(batches(), stager)):
            assert batch.name == "spec"
            x, y = batch.values["x"].parts[0], batch.values["y"].left
            assert x.shape == ((1, 3) if number == 5 else (2, 3))
            assert (np.asarray(x) == number).all()
            assert (np.asarray(y) == -number).all()


def test_a_prefetch_bills_what_is_inside(stager: Stager) -> None:
    with xferlib.prefetch(iter([Node(A)]), stager) as loop:
        assert loop.bill.device_nbytes == 4 * A.nbytes
    source = stager.empty_pinned(A.shape, A.dtype)
    source[...] = A
    with xferlib.prefetch(iter([Node(source)]), stager) as loop:
        assert loop.bill.pinned_nbytes == 3 * A.nbytes


def test_a_drain_takes_them_and_fills_rows(stager: Stager) -> None:
    results = [device_tree(Static({"x": np.full((2, 3), number, np.float32)}, "r")) for number in range(3)]
    with xferlib.Drain(stager, 3) as drain:
        for result in results:
            drain.submit(result)
        drain.end()
        assert [int(back.values["x"][0, 0]) for back in drain.results()] == [0, 1, 2]
    with xferlib.Drain(stager, 3) as drain:
        drain.submit(device_tree(Node(np.zeros((2, 3), np.float32))))
        assert drain.bill is not None
        assert drain.bill.device_nbytes == 5 * 24
    out = Static({"x": np.zeros((6, 3), np.float32)}, "r")
    with xferlib.Drain(stager, 2, out=out) as drain:
        for result in results:
            drain.submit(result)
        drain.synchronize()
    assert out.values["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    with xferlib.Drain(stager, 2, out=Static(out.values, "other")) as drain, pytest.raises(ValueError, match="compared with out"):
        drain.submit(results[0])


def test_the_state_of_a_flax_program_goes_there_and_back(stager: Stager) -> None:
    linen = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    core, train_state = pytest.importorskip("flax.core"), pytest.importorskip("flax.training.train_state")
    model = linen.Dense(3)
    params = core.freeze(model.init(jax.random.key(0), np.ones((1, 4), np.float32)))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    state = state.replace(step=jax.numpy.zeros((), np.int32))
    back = stager.get(state).result()
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back))
    again = stager.put(back).result()
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert again.apply_fn is state.apply_fn
    same(again.params, params, jax.Array)


def test_the_state_of_an_nnx_program_goes_there_and_back(stager: Stager) -> None:
    nnx = pytest.importorskip("flax.nnx")
    _, state = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    back = stager.get(state).result()
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for found, expected in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert isinstance(found, np.ndarray)
        assert (found == np.asarray(expected)).all()
