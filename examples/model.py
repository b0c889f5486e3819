"""A small convolutional classifier in plain JAX, with its training step."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

State: TypeAlias = tuple[Any, Any]
"""Parameters and momenta: trees of the same structure."""


def init(classes: int) -> State:
    """Return a fresh model."""
    shapes = {"first": (3, 3, 3, 16), "second": (3, 3, 16, 32), "last": (32, classes)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    parameters = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        parameters[name] = jax.random.normal(key, shape) * (2 * shape[-1] / jnp.prod(jnp.array(shape))) ** 0.5
    return parameters, jax.tree.map(jnp.zeros_like, parameters)


def step(state: State, batch: Any) -> tuple[State, Any]:
    """Return the state after one batch, and the loss before it. To be compiled."""
    parameters, momenta = state
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    momenta = jax.tree.map(lambda momentum, gradient: 0.9 * momentum + gradient, momenta, gradients)
    parameters = jax.tree.map(lambda parameter, momentum: parameter - 0.05 * momentum, parameters, momenta)
    return (parameters, momenta), loss


def loss_of(parameters: Any, batch: Any) -> Any:
    """Return the mean cross-entropy of a batch."""
    logits = jax.nn.log_softmax(scores(parameters, batch["image"]))
    return -jnp.take_along_axis(logits, batch["label"][:, None], axis=1).mean()


def scores(parameters: Any, images: Any) -> Any:
    """Return a number for every image and class. Bytes become floats here, on the device: they are a quarter of the transfer."""
    values = images.astype(jnp.float32) / 127.5 - 1
    for layer in ("first", "second"):
        values = jax.lax.conv_general_dilated(values, parameters[layer], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        values = jax.nn.relu(values)
    return values.mean((1, 2)) @ parameters["last"]
