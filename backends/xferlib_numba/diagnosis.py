"""What the user should read about Numba on this machine, whether or not the backend is ready. Needs neither Numba nor a device."""

from __future__ import annotations

from importlib import import_module, metadata

import numpy as np

from xferlib_numba._module import DISTRIBUTIONS, Numba, load

__all__ = ["findings", "versions"]

SUCCESSOR, MAINTAINED = "numba-cuda-mlir", "numba-cuda"


def versions() -> dict[str, str]:
    """Return the installed distributions that make up Numba's CUDA side."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def findings() -> list[str]:
    """Return sentences."""
    found = []
    installed = versions()
    if SUCCESSOR in installed and MAINTAINED in installed:
        found.append(
            f"{SUCCESSOR} {installed[SUCCESSOR]} and {MAINTAINED} {installed[MAINTAINED]} are both installed, and neither compiles "
            "kernels for the other's arrays. Stagers give out arrays of the first, unless the program has imported the other alone "
            "before; uninstall the one that your kernels do not use"
        )
    if MAINTAINED in installed and SUCCESSOR not in installed and not hasattr(np, "row_stack"):
        found.append(
            "numba-cuda, up to 0.30.4 at least, transfers but cannot compile kernels on NumPy 2.5 and newer. Here are numba-cuda "
            f"{installed[MAINTAINED]} and NumPy {np.__version__}. Set numpy.row_stack = numpy.vstack before the first kernel, or "
            'install an older one with: pip install "numpy<2.5"'
        )
    numba = _with_driver()
    if numba is not None and not _has_compiler(numba):
        found.append(
            "Numba finds no NVVM: transfers work, but nothing can be compiled, so the demo cannot compute on the GPU. "
            f'Install it with: pip install "{numba.distribution}[cu13]"'
        )
    return found


def _with_driver() -> Numba | None:
    try:
        numba = load()
        driver_is_there = numba.driver.driver.initialization_error is None
    except Exception:
        # A Numba that cannot be imported is what opening the backend reports.
        return None
    return numba if driver_is_there else None


def _has_compiler(numba: Numba) -> bool:
    if numba.distribution != MAINTAINED:
        # Its compiler comes with it.
        return True
    try:
        import_module(numba.driver.__name__.replace(".driver", ".nvvm")).NVVM()
    except Exception:
        # The classes differ from version to version, and some of them are ImportErrors.
        return False
    return True
