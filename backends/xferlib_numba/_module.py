"""Which Numba is installed, and where it keeps its parts. The only file that knows the two packages apart.

`numba-cuda` provides `numba.cuda` and is only maintained; `numba-cuda-mlir` is its successor. They share the code of their driver
layers, but neither compiles kernels for the other's arrays. Where both are installed, the one that the program has already imported
is used.
Nothing here touches the driver.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from xferlib.errors import BackendUnavailableError

__all__ = ["DISTRIBUTIONS", "INSTALL", "Numba", "load", "refusal"]

INSTALL = 'Install it with: pip install "numba-cuda[cu12]>=0.30" (CUDA 12) or "numba-cuda[cu13]>=0.30" (CUDA 13)'


class Package(NamedTuple):
    """One of the two, by the names of its modules."""

    distribution: str
    public: str
    inside: str


PACKAGES = (
    Package("numba-cuda-mlir", "numba_cuda_mlir.cuda", "numba_cuda_mlir.numba_cuda"),
    Package("numba-cuda", "numba.cuda", "numba.cuda"),
)
DISTRIBUTIONS = (*(package.distribution for package in PACKAGES), "numba", "cuda-bindings", "cuda-core")
"""The packages on whose versions answers depend."""


class Numba(NamedTuple):
    """The parts that this backend uses."""

    distribution: str
    cuda: Any
    """The public module: what a user imports as `cuda`."""
    driver: Any
    """The module of the driver layer: `driver`, `binding`, `MemoryPointer`, `Stream`, and the errors."""
    array: Any
    """The class `DeviceNDArray`."""
    from_dtype: Callable[[Any], Any]
    """Numba's type of a NumPy dtype; raises if it has none."""


@functools.cache
def load() -> Numba:
    """Import Numba's CUDA module. Raises `BackendUnavailableError` if there is none that can move memory.

    Only a missing package is "not installed". A broken one raises its own error, untouched.
    """
    with warnings.catch_warnings():
        # Numba uses what NumPy 2.5 deprecates, and warns while it is imported. Where warnings are errors, the import would fail.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _load_first()


def _load_first() -> Numba:
    # A stable sort: the successor first, unless the other alone is in use.
    for package in sorted(PACKAGES, key=lambda package: package.public not in sys.modules):
        cuda = _import(package)
        if cuda is not None:
            return _parts(package, cuda)
    raise refusal("Numba's CUDA module is not installed", INSTALL)


def refusal(reason: str, advice: str) -> BackendUnavailableError:
    """Return the error that says why this backend cannot run and what to do."""
    return BackendUnavailableError(f"backend 'numba' cannot run here: {reason}. {advice}")


def _import(package: Package) -> Any:
    try:
        return import_module(package.public)
    except ModuleNotFoundError as error:
        if error.name not in (package.public, package.public.partition(".")[0]):
            raise
        return None


def _parts(package: Package, cuda: Any) -> Numba:
    config = import_module(f"{package.inside}.core.config") if package.inside != "numba.cuda" else _config_of_numba_cuda(cuda)
    if getattr(config, "ENABLE_CUDASIM", 0) and package.public == "numba.cuda":
        raise refusal("NUMBA_ENABLE_CUDASIM simulates CUDA on the CPU, so nothing is transferred", "Unset NUMBA_ENABLE_CUDASIM")
    driver = import_module(f"{package.inside}.cudadrv.driver")
    if not hasattr(driver, "binding"):
        raise refusal("this numba-cuda is older than 0.24", f"Update it. {INSTALL}")
    return Numba(
        package.distribution,
        cuda,
        driver,
        import_module(f"{package.inside}.cudadrv.devicearray").DeviceNDArray,
        import_module(f"{package.inside}.np.numpy_support").from_dtype,
    )


def _config_of_numba_cuda(cuda: Any) -> Any:
    if getattr(cuda, "implementation", "Built-in") != "NVIDIA":
        raise refusal("only the numba.cuda that Numba itself still carries is installed, which nobody maintains", INSTALL)
    return import_module("numba.cuda.core.config")
