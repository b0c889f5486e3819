"""Fresh device arrays: when they are sent, when a function is compiled that only allocates, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
from xferlib_jax import _fresh
from xferlib_jax._fresh import WORTH_COMPILING_NBYTES, FreshArrays

SIZE = WORTH_COMPILING_NBYTES // 4


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each array that is sent from the host."""
    found: list[int] = []
    put: Callable[..., Any] = jax.device_put

    def device_put(array: Any, *more: Any) -> Any:
        found.append(array.nbytes)
        return put(array, *more)

    monkeypatch.setattr(jax, "device_put", device_put)
    return found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> FreshArrays:
    """On a CPU `jax.lax.empty` is a constant that is repeated, which does here."""
    target = _fresh.TARGET if jax.devices()[0].platform != "cpu" else "broadcast_in_dim"
    monkeypatch.setattr(_fresh, "TARGET", target)
    return FreshArrays(jax.devices()[0])


def is_fresh(array: Any, nbytes: int) -> bool:
    return (
        array.shape == (nbytes,)
        and array.dtype == np.uint8
        and array.devices() == {jax.devices()[0]}
        and not isinstance(array, jax.core.Tracer)
    )


def test_a_function_is_compiled_once_as_much_was_sent_as_that_is_worth(fresh: FreshArrays, sent: list[int]) -> None:
    made = [fresh.make(SIZE) for _ in range(6)]
    assert sent == [SIZE] * 3
    assert all(is_fresh(array, SIZE) for array in made)
    assert len({array.unsafe_buffer_pointer() for array in made}) == 6
    fresh.make(SIZE + 1)
    assert sent == [SIZE] * 3 + [SIZE + 1], "sizes are counted by themselves"


def test_one_large_array_is_worth_it(fresh: FreshArrays, sent: list[int]) -> None:
    assert is_fresh(fresh.make(WORTH_COMPILING_NBYTES), WORTH_COMPILING_NBYTES)
    assert not sent


def test_inside_a_function_that_is_traced_arrays_are_made_at_once(fresh: FreshArrays) -> None:
    made: list[Any] = []

    def traced(value: Any) -> Any:
        made.extend(fresh.make(size) for size in (5, WORTH_COMPILING_NBYTES))
        return value

    assert "empty" not in str(jax.make_jaxpr(traced)(1))
    assert is_fresh(made[0], 5)
    assert is_fresh(made[1], WORTH_COMPILING_NBYTES)


def test_without_room_arrays_are_sent(fresh: FreshArrays, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That fails at once where a function would be ten seconds about it."""
    monkeypatch.setattr(_fresh, "has_room", lambda nbytes, device: False)
    fresh.make(WORTH_COMPILING_NBYTES)
    assert sent == [WORTH_COMPILING_NBYTES]


@pytest.mark.parametrize("why", ["the lowering has another operation", "it cannot be compiled"])
def test_where_there_is_no_such_function_arrays_are_sent(why: str, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def empty(shape: Any, dtype: Any) -> Any:
        asked.append(shape)
        if why == "it cannot be compiled":
            raise NotImplementedError
        return jax.numpy.zeros(shape, dtype)

    monkeypatch.setattr(jax.lax, "empty", empty)
    fresh = FreshArrays(jax.devices()[0])
    for _ in range(2):
        assert is_fresh(fresh.make(WORTH_COMPILING_NBYTES), WORTH_COMPILING_NBYTES)
    assert sent == [WORTH_COMPILING_NBYTES] * 2
    assert len(asked) == 1


def test_functions_have_a_number(fresh: FreshArrays, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fresh, "MOST", 1)
    for nbytes in (WORTH_COMPILING_NBYTES, WORTH_COMPILING_NBYTES + 1, WORTH_COMPILING_NBYTES):
        fresh.make(nbytes)
    assert sent == [WORTH_COMPILING_NBYTES + 1]


def test_on_gpus_this_jax_allocates_and_does_nothing_else() -> None:
    """Else blocks would be sent: right, and slow."""
    lowered = jax.jit(partial(jax.lax.empty, (64,), np.uint8)).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{_fresh.TARGET}()" in lowered
    assert lowered.count("stablehlo.") == 1


@pytest.mark.parametrize(("in_use", "fits"), [(81, False), (80, True), (0, True)])
def test_room_is_what_the_limit_leaves(in_use: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": in_use, "bytes_limit": 100}

    monkeypatch.setattr(_fresh, "memory_grows", lambda: None)
    assert _fresh.has_room(20, Device()) == fits
    monkeypatch.setattr(_fresh, "memory_grows", lambda: "it does")
    assert _fresh.has_room(20, Device()), "nobody can say"


def test_without_jit_arrays_are_sent(fresh: FreshArrays, sent: list[int]) -> None:
    fresh.make(WORTH_COMPILING_NBYTES)
    assert not sent
    with jax.disable_jit():
        assert is_fresh(fresh.make(WORTH_COMPILING_NBYTES), WORTH_COMPILING_NBYTES)
    assert sent == [WORTH_COMPILING_NBYTES]


def test_a_function_that_was_refused_once_is_compiled_later(
    fresh: FreshArrays, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's settings may refuse it: JAX takes no device beside those of the mesh that is set there."""
    jit = jax.jit

    def refuses(*arguments: Any, **options: Any) -> Any:
        raise ValueError("Received incompatible devices for jitted computation")

    monkeypatch.setattr(jax, "jit", refuses)
    for _ in range(2):
        fresh.make(WORTH_COMPILING_NBYTES)
    monkeypatch.setattr(jax, "jit", jit)
    fresh.make(WORTH_COMPILING_NBYTES)
    assert sent == [WORTH_COMPILING_NBYTES] * 2
