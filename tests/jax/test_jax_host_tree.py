"""Groups of JAX's arrays whose home is the host: donated updates are those of a state that never left the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import xferlib

jax = pytest.importorskip("jax")


class Group(NamedTuple):
    weights: Any
    moments: Any


def beginning(number: int) -> Group:
    weights = jax.random.normal(jax.random.key(number), (37, 5 + number))
    return Group(weights, {"mean": jax.numpy.zeros_like(weights, "bfloat16"), "square": jax.numpy.zeros_like(weights)})


def updated(group: Group) -> Group:
    gradient = jax.numpy.sin(group.weights)
    mean = (0.9 * group.moments["mean"] + 0.1 * gradient).astype("bfloat16")
    square = 0.99 * group.moments["square"] + 0.01 * gradient**2
    return Group(group.weights - 0.1 * mean / (jax.numpy.sqrt(square) + 1e-8), {"mean": mean, "square": square})


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape, np.asarray(one).tobytes()) == (other.dtype, other.shape, np.asarray(other).tobytes())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_donated_updates_are_bit_for_bit_those_without_a_home_on_the_host(stager: xferlib.Stager, count: int) -> None:
    update = jax.jit(updated, donate_argnums=0)
    want = {f"layer_{number}": beginning(number) for number in range(count)}
    with xferlib.HostTree(want, stager) as home:
        for _ in range(4):
            for name, group in home.fetch_each():
                home.store(name, update(group))
        for name in want:
            for _ in range(4):
                want[name] = update(want[name])
            same(home[name], want[name])
            same(home.fetch(name).result(), want[name])


def test_a_group_of_another_device_or_library_is_refused_and_harms_nothing(stager: xferlib.Stager) -> None:
    with xferlib.HostTree({"a": jax.numpy.arange(5.0)}, stager) as home:
        with pytest.raises(TypeError, match=r"expected a jax\.Array"):
            home.store("a", np.zeros(5, np.float32))
        gone = jax.numpy.zeros(5)
        gone.delete()
        with pytest.raises(ValueError, match="was deleted"):
            home.store("a", gone)
        with pytest.raises(ValueError, match="home is of shape"):
            home.store("a", jax.numpy.zeros(6))
        assert home["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_dtype_that_no_fetch_would_bring_is_refused_before_memory_is_taken(stager: xferlib.Stager) -> None:
    taken = stager.stats().pinned_used_nbytes
    for array, words in ((np.zeros(3, "M8[s]"), "no arrays of dtype datetime64"), (np.zeros(3), "JAX would narrow float64")):
        with jax.enable_x64(False), pytest.raises(TypeError, match=words) as caught:
            xferlib.HostTree({"a": {"x": np.zeros(3, np.float32), "y": array}}, stager)
        assert caught.value.__notes__ == ["at group 'a': tree.y"]
    assert stager.stats().pinned_used_nbytes == taken
    with jax.enable_x64(True), xferlib.HostTree({"a": np.full(3, 0.1)}, stager) as home:
        assert np.asarray(home.fetch("a").result()).tolist() == [0.1] * 3


def test_it_is_saved_by_a_stager_of_the_host_and_loaded_again(stager: xferlib.Stager, tmp_path: Path) -> None:
    path = tmp_path / "home.safetensors"
    with xferlib.HostTree({"a": beginning(0), "b": beginning(1)}, stager) as home, xferlib.stager("host") as host:
        home.store("b", updated(beginning(1)))
        xferlib.save(path, home.tree, host).result(60)
        with pytest.raises(TypeError, match=r"expected a jax\.Array"):
            xferlib.save(path, home.tree, stager)
    with xferlib.stager("host") as host:
        tree = xferlib.load(path, host, like={"a": jax.eval_shape(lambda: beginning(0)), "b": jax.eval_shape(lambda: beginning(1))})
    with xferlib.HostTree(tree, stager) as home:
        same(home.fetch("b").result(), updated(beginning(1)))
