"""How others save a state, and bring it back to the device: a `Saver` or a `Loader` for each way, imported when it is opened.

A state is a dict of device arrays of bytes. Everything here waits until it is done, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Finish", "Format", "Loader", "Saver", "State", "loaders", "open_format", "read_safetensors", "savers"]

State: TypeAlias = Mapping[str, Any]
Finish: TypeAlias = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Saver:
    """`save` returns when the caller may go on, and what it returns is called to wait until the file is there.

    `read` iterates the arrays of that file on the host.
    """

    name: str
    save: Callable[[Path, State], Finish]
    read: Callable[[Path], Iterator[tuple[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a file, or a folder, that a loader reads is written from host arrays. One kind serves several loaders."""

    suffix: str
    write: Callable[[Path, dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """`load` returns arrays on the device, done; `host` brings one of them back to be compared."""

    name: str
    kind: str
    """Of the file: see `open_format`."""
    load: Callable[[Path], State]
    host: Callable[[Any], Any]


def read_safetensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Iterate the arrays of a file, one in memory at a time."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  # It is no dict.
            yield name, file.get_tensor(name)


def savers(backend: str) -> dict[str, Callable[[], Saver]]:
    """Return the openers by name. Opening one raises what its imports raise."""
    to_host: dict[str, dict[str, Callable[[], Saver]]] = {
        "host": {"safetensors": partial(_by_safetensors, "safetensors", lambda: dict)},
        "cupy": {"cupy.asnumpy, then safetensors": partial(_by_safetensors, "cupy.asnumpy, then safetensors", _asnumpy)},
        "numba": {"copy_to_host, then safetensors": partial(_by_safetensors, "copy_to_host, then safetensors", _copied_to_host)},
        "jax": {
            "copy_to_host_async, then safetensors": _by_async_copies,
            "jax.device_get, then safetensors": partial(_by_safetensors, "jax.device_get, then safetensors", _device_get),
            "Orbax": _by_orbax,
        },
    }
    return {**to_host.get(backend, {}), "torch.save": partial(_by_torch, backend)}


def loaders(backend: str) -> dict[str, Callable[[], Loader]]:
    """Return the openers by name. Opening one raises what its imports raise."""
    found: dict[str, Callable[[], Loader]] = {
        "safetensors.torch": partial(_from_torch, backend, "safetensors"),
        "torch.load": partial(_from_torch, backend, "torch"),
    }
    if backend == "host":
        found = {"safetensors.numpy": partial(_from_safetensors, "safetensors.numpy", _on_host), **found}
    elif backend == "cupy":
        found = {
            "safetensors.numpy, cupy.asarray": partial(_from_safetensors, "safetensors.numpy, cupy.asarray", _by_cupy),
            **found,
        }
    elif backend == "jax":
        put = "safetensors.numpy, jax.device_put"
        found = {"safetensors.flax": _from_flax, put: partial(_from_safetensors, put, _by_jax), "Orbax": _from_orbax, **found}
    return found


def open_format(kind: str) -> Format:
    """Return how files of a kind are written. Raises what its imports raise."""
    if kind == "safetensors":
        return Format(suffix=".safetensors", write=lambda path, arrays: import_module("safetensors.numpy").save_file(arrays, path))
    if kind == "torch":
        torch = import_module("torch")

        def write(path: Path, arrays: dict[str, Any]) -> None:
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)

        return Format(suffix=".pt", write=write)
    ocp = import_module("orbax.checkpoint")

    def write_folder(path: Path, arrays: dict[str, Any]) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, arrays)

    return Format(suffix=".orbax", write=write_folder)


def _by_safetensors(name: str, opener: Callable[[], Callable[[State], dict[str, Any]]]) -> Saver:
    save_file, to_host = import_module("safetensors.numpy").save_file, opener()

    def save(path: Path, state: State) -> Finish:
        save_file(to_host(state), path)
        return _nothing

    return Saver(name=name, save=save, read=read_safetensors)


def _asnumpy() -> Callable[[State], dict[str, Any]]:
    asnumpy = import_module("cupy").asnumpy
    return lambda state: {name: asnumpy(array) for name, array in state.items()}


def _copied_to_host() -> Callable[[State], dict[str, Any]]:
    return lambda state: {name: array.copy_to_host() for name, array in state.items()}


def _device_get() -> Callable[[State], dict[str, Any]]:
    device_get = import_module("jax").device_get
    return lambda state: dict(device_get(_unseen(state)))


def _unseen(state: State) -> dict[str, Any]:
    """Return other objects for the same arrays: JAX keeps in each what it once brought to the host, and would do so only once."""
    return {name: array.addressable_data(0) for name, array in state.items()}


def _by_async_copies() -> Saver:
    save_file = import_module("safetensors.numpy").save_file

    def save(path: Path, state: State) -> Finish:
        arrays = _unseen(state)
        for array in arrays.values():
            array.copy_to_host_async()
        return lambda: save_file({name: np.asarray(array) for name, array in arrays.items()}, path)

    return Saver(name="copy_to_host_async, then safetensors", save=save, read=read_safetensors)


def _by_orbax() -> Saver:
    ocp, jax = import_module("orbax.checkpoint"), import_module("jax")
    checkpointer = ocp.StandardCheckpointer()

    def save(path: Path, state: State) -> Finish:
        checkpointer.save(path, _unseen(state))
        return checkpointer.wait_until_finished  # type: ignore[no-any-return]  # Orbax is not typed here.

    def read(path: Path) -> Iterator[tuple[str, Any]]:
        found = checkpointer.restore(path)
        return iter([(name, np.asarray(array)) for name, array in jax.tree.map(lambda array: array, found).items()])

    return Saver(name="Orbax", save=save, read=read)


def _by_torch(backend: str) -> Saver:
    torch = import_module("torch")

    def save(path: Path, state: State) -> Finish:
        torch.save({name: torch.from_dlpack(array) for name, array in state.items()}, path)
        return _nothing

    def read(path: Path) -> Iterator[tuple[str, Any]]:
        found = torch.load(path, map_location="cpu", mmap=True)
        return ((name, tensor.numpy()) for name, tensor in found.items())

    if backend == "numba":
        raise RuntimeError("torch takes no arrays of Numba's without a copy")
    return Saver(name="torch.save", save=save, read=read)


def _from_safetensors(name: str, opener: Callable[[], tuple[Callable[[State], State], Callable[[Any], Any]]]) -> Loader:
    load_file, (put, host) = import_module("safetensors.numpy").load_file, opener()
    return Loader(name=name, kind="safetensors", load=lambda path: put(load_file(path)), host=host)


def _on_host() -> tuple[Callable[[State], State], Callable[[Any], Any]]:
    return (lambda state: state), (lambda array: array)


def _by_cupy() -> tuple[Callable[[State], State], Callable[[Any], Any]]:
    cupy = import_module("cupy")

    def put(state: State) -> State:
        found = {name: cupy.asarray(array) for name, array in state.items()}
        cupy.cuda.Device().synchronize()
        return found

    return put, cupy.asnumpy


def _by_jax() -> tuple[Callable[[State], State], Callable[[Any], Any]]:
    jax = import_module("jax")
    # Otherwise, on the CPU, they would be the file's own memory.
    return (lambda state: jax.block_until_ready(jax.device_put(dict(state), may_alias=False))), np.asarray


def _from_flax() -> Loader:
    jax, load_file = import_module("jax"), import_module("safetensors.flax").load_file
    return Loader(
        name="safetensors.flax", kind="safetensors", load=lambda path: jax.block_until_ready(load_file(path)), host=np.asarray
    )


def _from_orbax() -> Loader:
    ocp, jax = import_module("orbax.checkpoint"), import_module("jax")
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def load(path: Path) -> State:
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = jax.tree.map(
                lambda known: jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=place), _metadata(checkpointer, path)
            )
            return dict(jax.block_until_ready(checkpointer.restore(path, shapes)))

    return Loader(name="Orbax", kind="orbax", load=load, host=np.asarray)


def _metadata(checkpointer: Any, path: Path) -> Any:
    found = checkpointer.metadata(path)
    found = getattr(found, "item_metadata", found)
    return dict(getattr(found, "tree", found))


def _from_torch(backend: str, kind: str) -> Loader:
    torch = import_module("torch")
    device = "cpu" if backend == "host" or not torch.cuda.is_available() else "cuda"

    def wait(state: State) -> State:
        if device == "cuda":
            torch.cuda.synchronize()
        return state

    def load(path: Path) -> State:
        if kind == "torch":
            return wait(torch.load(path, map_location=device, mmap=True))
        return wait(import_module("safetensors.torch").load_file(path, device=device))

    name = "torch.load" if kind == "torch" else "safetensors.torch"
    return Loader(name=name, kind=kind, load=load, host=lambda tensor: tensor.cpu().numpy())


def _nothing() -> None:
    pass
