"""The device work of the JAX backend: edges of frames, in functions that JAX compiles. The arithmetic is `xferlib.workload`'s.

JAX arrays never change, so a slot is no memory here: each launch returns a new array out of JAX's pool. Frames of floats need
doubles, so inside the job the calling thread's 64-bit types are on.

Each operation on floats is rounded on its own. Compiled together, a product and a sum may become one operation that is rounded
once, and a division by a value that is the same for a whole frame may become a product. So such pairs stand in functions of their
own.

How often a loop runs is known when it is compiled. Of any other loop XLA reads back, round by round, whether it goes on: such a
small copy to the host stands behind the large ones that are to run beside the compute, and whoever launches the loop waits for it.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, final

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax import numpy as jnp

from xferlib.errors import BackendUnavailableError
from xferlib.workload import EdgeSpec, FrameworkCopy

__all__ = ["EdgeJob", "edge_job", "framework_copies"]

RED, GREEN, BLUE = 0.299, 0.587, 0.114
BLURS = (64, 8)
"""Rounds of blur that are compiled as one; those that are left are compiled with the edges. A launch is made of few: each takes the
caller some time, and JAX makes who launches wait beyond 32 at once."""


def edge_job(spec: EdgeSpec, *, device: int = 0) -> EdgeJob:
    """Compile the functions and make a job."""
    devices = jax.local_devices()
    if not 0 <= device < len(devices):
        raise BackendUnavailableError(f"backend 'jax' cannot run here: there is no device {device!r} among {devices}")
    return EdgeJob(spec, devices[device])


@final
class EdgeJob:
    """See `xferlib.workload.EdgeJob`. A batch of another size than `spec.frames` is compiled when it first comes."""

    def __init__(self, spec: EdgeSpec, device: Any) -> None:
        self._device = device
        self._states = ExitStack()
        self._last: list[Any] = [None] * spec.slots
        with jax.enable_x64(True):
            self._normalise = _normalise_floats if spec.dtype.kind == "f" else normalise_integers
            frames = jax.device_put(np.zeros((spec.frames, *spec.frame_shape), spec.dtype), device)
            images = self._normalise(frames)
            for rounds in BLURS:
                # Without a run: on a CPU many rounds take long.
                blurred.lower(images, rounds).compile()
            self.launch(frames, 0, rounds=1).block_until_ready()

    def __enter__(self) -> Self:
        self._states.enter_context(jax.enable_x64(True))
        self._states.enter_context(jax.default_device(self._device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.synchronize()
        finally:
            self._states.close()

    def launch(self, frames: Any, slot: int, *, rounds: int) -> Any:
        """Do as the contract says, but the result is the caller's: the next launch into the slot returns another array."""
        images = self._normalise(frames)
        for compiled in BLURS:
            times, rounds = divmod(rounds, compiled)
            for _ in range(times):
                images = blurred(images, compiled)
        result = edges(images, rounds)
        self._last[slot] = result
        return result

    def synchronize(self) -> None:
        last, self._last = self._last, [None] * len(self._last)
        for result in last:
            if result is not None:
                result.block_until_ready()


def framework_copies(pageable: npt.NDArray[np.uint8], pinned: npt.NDArray[np.uint8], array: Any) -> list[FrameworkCopy]:
    """Return JAX's own ways. See `xferlib.workload.CopiesItself`."""
    (device,) = array.devices()
    # An array keeps what was read of it, so each copy to the host is of another one.
    fresh = [copied(array).block_until_ready()]

    def renew() -> None:
        fresh[0] = copied(array).block_until_ready()

    def put(source: npt.NDArray[np.uint8]) -> FrameworkCopy:
        return FrameworkCopy(
            call=f"jax.device_put({'pinned' if source is pinned else 'pageable'})",
            direction="h2d",
            why="JAX allocates the target behind the compute that is enqueued by then, and the copy waits for that",
            start=lambda: jax.device_put(source, device),
            finish=lambda placed: placed.block_until_ready(),
        )

    def read() -> Any:
        return np.asarray(fresh[0])

    return [
        put(pageable),
        put(pinned),
        FrameworkCopy(
            call="np.asarray(array)",
            direction="d2h",
            why="It keeps the caller until the copy is made, by way of JAX's own staging memory",
            start=read,
            finish=lambda _: None,
            renew=renew,
        ),
        FrameworkCopy(
            call="array.copy_to_host_async()",
            direction="d2h",
            why="The copy goes by way of JAX's own staging memory, into pageable memory",
            start=lambda: fresh[0].copy_to_host_async(),
            finish=lambda _: read(),
            renew=renew,
        ),
    ]


def _normalise_integers(frames: Any) -> Any:
    wide = frames.astype(jnp.int32)
    if frames.ndim == 3:
        grey = wide
    elif frames.shape[3] < 3:
        grey = wide[..., 0]
    else:
        grey = (77 * wide[..., 0] + 150 * wide[..., 1] + 29 * wide[..., 2]) >> 8
    low, high = (extreme(grey, axis=(1, 2), keepdims=True) for extreme in (jnp.min, jnp.max))
    return ((grey - low) * 255 // jnp.maximum(high - low, 1)).astype(jnp.uint8)


def _normalise_floats(frames: Any) -> Any:
    """Return bytes, through three functions; everything is rounded between them."""
    return stretched(halves(weighted(frames)))


def _weighted(frames: Any) -> tuple[Any, ...]:
    """Return the products that make up grey."""
    wide = frames.astype(jnp.float64)
    if frames.ndim == 3:
        return (wide,)
    if frames.shape[3] < 3:
        return (wide[..., 0],)
    return wide[..., 0] * RED, wide[..., 1] * GREEN, wide[..., 2] * BLUE


def _halves(parts: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return what is above the least value, halved, how far the values reach, halved, for each pixel, and whether they differ."""
    grey = parts[0] if len(parts) == 1 else (parts[0] + parts[1]) + parts[2]
    finite = jnp.isfinite(grey)
    low = jnp.min(jnp.where(finite, grey, jnp.inf), axis=(1, 2), keepdims=True)
    high = jnp.max(jnp.where(finite, grey, -jnp.inf), axis=(1, 2), keepdims=True)
    # Without a finite value the least is infinite, and greater than the greatest.
    differ = high * 0.5 > low * 0.5
    spans = jnp.where(differ, high * 0.5 - low * 0.5, 1.0)
    return jnp.where(finite, grey, low) * 0.5 - low * 0.5, jnp.broadcast_to(spans, grey.shape), differ


def _stretched(parts: tuple[Any, Any, Any]) -> Any:
    values, spans, differ = parts
    return jnp.where(differ, values / spans * 255.0, 0.0).astype(jnp.uint8)


def _blurred(images: Any, rounds: int) -> Any:
    """Blur bytes."""
    return _blurs(images, rounds).astype(jnp.uint8)


def _edges(images: Any, rounds: int) -> Any:
    """Blur bytes, and take the slopes."""
    wide = _blurs(images, rounds)
    strength = jnp.abs(_slope(_smooth(wide, 1), 2)) + jnp.abs(_slope(_smooth(wide, 2), 1))
    return jnp.minimum(strength, 255).astype(jnp.uint8)


def _blurs(images: Any, rounds: int) -> Any:
    """Return blurred bytes as 32 bits each."""
    return lax.fori_loop(0, rounds, lambda _, image: (_smooth(_smooth(image, 2), 1) + 8) >> 4, images.astype(jnp.int32))


def _smooth(image: Any, axis: int) -> Any:
    before, after = _neighbours(image, axis)
    return before + 2 * image + after


def _slope(image: Any, axis: int) -> Any:
    before, after = _neighbours(image, axis)
    return after - before


def _neighbours(image: Any, axis: int) -> tuple[Any, Any]:
    """Return what stands before and after each pixel; past the ends the end pixel counts again."""
    length = image.shape[axis]
    first, last = (lax.slice_in_dim(image, end, end + 1, axis=axis) for end in (0, length - 1))
    before = jnp.concatenate([first, lax.slice_in_dim(image, 0, length - 1, axis=axis)], axis=axis)
    after = jnp.concatenate([lax.slice_in_dim(image, 1, length, axis=axis), last], axis=axis)
    return before, after


# Compiled for each shape once, for all jobs. Not as decorators: JAX may be untyped to whoever checks types.
copied = jax.jit(jnp.copy)
normalise_integers = jax.jit(_normalise_integers)
weighted = jax.jit(_weighted)
halves = jax.jit(_halves)
stretched = jax.jit(_stretched)
blurred = jax.jit(_blurred, static_argnums=1)
edges = jax.jit(_edges, static_argnums=1)
