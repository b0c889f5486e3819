"""JAX: arrays move between NumPy and JAX while the device computes, on NVIDIA GPUs and on the CPU.

The entry point names `open_stager`; `prefetch`, `load`, `save` and what goes with them are for arrays that several devices share.
This file imports without JAX. What needs JAX is imported when a stager is opened, or when one of those names is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xferlib.protocol import HostStager

if TYPE_CHECKING:
    from xferlib_jax._load import load
    from xferlib_jax._narrowing import narrowed
    from xferlib_jax._prefetch import ShardedPrefetch, prefetch, prefetch_to_device
    from xferlib_jax._save import save
    from xferlib_jax._stagers import close, local_stagers

__all__ = [
    "ShardedPrefetch",
    "close",
    "load",
    "local_stagers",
    "narrowed",
    "open_stager",
    "prefetch",
    "prefetch_to_device",
    "save",
]


def open_stager(*, device: int = 0) -> HostStager[Any]:
    """Open the backend on one of JAX's local devices, as JAX counts them. Raises `BackendUnavailableError` with what to do."""
    from xferlib_jax._probe import open_backend

    return open_backend(device)


if not TYPE_CHECKING:
    # Hidden from checkers, which would believe that every name is here.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from xferlib_jax._probe import _import_jax

        _import_jax()
        from xferlib_jax import _load, _narrowing, _prefetch, _save, _stagers

        homes: dict[str, Any] = {
            "close": _stagers,
            "load": _load,
            "local_stagers": _stagers,
            "narrowed": _narrowing,
            "save": _save,
        }
        return getattr(homes.get(name, _prefetch), name)


def __dir__() -> list[str]:
    return sorted(__all__)
