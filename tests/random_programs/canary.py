"""Canaries: memory of others beside ours, with a pattern, so that a write of ours to memory that we do not have is seen.

They are of the framework's own, and of the bare runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from tests.random_programs.content import Array
from tests.random_programs.driver import DRIVER, bytes_at

__all__ = ["ArenaCanary", "Canary", "CupyCanary", "DriverCanary", "JaxCanary", "NumbaCanary", "NumpyCanary"]


class Canary(ABC):
    """Memory that is not the library's, with a pattern."""

    @abstractmethod
    def read(self) -> Array: ...

    def free(self) -> None:
        """Give it back, where it does not go by itself."""
        return


@final
class NumpyCanary(Canary):
    def __init__(self, pattern: Array) -> None:
        self._array = pattern.copy()

    def read(self) -> Array:
        return self._array


@final
class ArenaCanary(Canary):
    def __init__(self, pattern: Array) -> None:
        self._address = DRIVER.allocate(pattern.nbytes)
        self._array: Array = bytes_at(self._address, pattern.nbytes)
        self._array[...] = pattern

    def read(self) -> Array:
        return self._array

    def free(self) -> None:
        DRIVER.free(self._address)


@final
class JaxCanary(Canary):
    def __init__(self, jax: Any, pattern: Array) -> None:
        self._array = jax.device_put(pattern.copy(), jax.local_devices()[0]).block_until_ready()

    def read(self) -> Array:
        from xferlib_jax import conformance

        values: Array = conformance.bench().values(self._array)
        return values


@final
class CupyCanary(Canary):
    def __init__(self, cupy: Any, pattern: Array) -> None:
        self._array = cupy.asarray(pattern)

    def read(self) -> Array:
        values: Array = self._array.get()
        return values


@final
class NumbaCanary(Canary):
    def __init__(self, cuda: Any, pattern: Array) -> None:
        self._array = cuda.to_device(pattern)
        cuda.default_stream().synchronize()

    def read(self) -> Array:
        values: Array = self._array.copy_to_host()
        return values


@final
class DriverCanary(Canary):
    """Memory of the bare driver's."""

    def __init__(self, pattern: Array) -> None:
        from xferlib.conformance import cuda

        self._nbytes = max(pattern.nbytes, 1)
        with cuda.context(0):
            self._address = int(cuda.call("cuMemAlloc", self._nbytes))
            cuda.call("cuMemcpyHtoD", self._address, pattern.ctypes.data, pattern.nbytes)

    def read(self) -> Array:
        from xferlib.conformance import cuda

        values = np.empty(self._nbytes, np.uint8)
        with cuda.context(0):
            cuda.call("cuMemcpyDtoH", values.ctypes.data, self._address, self._nbytes)
        return values

    def free(self) -> None:
        from xferlib.conformance import cuda

        with cuda.context(0):
            cuda.call("cuMemFree", self._address)
