"""Device views of pinned host memory: what may be viewed, and what is refused with which advice.

Nothing is copied here and nothing is waited for; how long the memory is held stands in `views`.
"""

from __future__ import annotations

from typing import Any, cast, final

from xferlib.errors import TransferError
from xferlib.memory.arrays import Array, host_array
from xferlib.memory.host import HostMemory
from xferlib.protocol import HostStager, MapsMemory
from xferlib.views import Views
from xferlib.words import in_words

__all__ = ["Maps"]


@final
class Maps:
    """Makes the views of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], host: HostMemory, views: Views) -> None:
        self._backend = backend
        self._host = host
        self._views = views

    def view(self, array: object, stream: object | None) -> Any:
        """Return the view of an array. The backend has the capability `mapped`."""
        plain = host_array(array)
        self._host.check_dtype(plain.dtype)
        address = self._address(plain)
        row, lease = self._views.lease(plain)
        backend = cast("MapsMemory[Any]", self._backend)
        try:
            view, row.stream = backend.as_mapped(address, plain.shape, plain.dtype, stream=stream, lease=lease)
        except self._backend.failures as error:
            raise TransferError(f"the device could not be given a view of {in_words(plain.nbytes)}: {error}") from error
        return view

    def _address(self, array: Array) -> int:
        if array.nbytes == 0:
            raise ValueError("an empty array has no memory to view. Put it")
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous in C order. Map the array that it is a view of, and cut the view")
        if not array.flags.writeable:
            raise ValueError("the array is read-only, and the device could write to it. Map an array that may be written")
        address = self._host.address(array)
        if address is None:
            raise ValueError(
                "the array is not in pinned memory, and the device reaches no other. Fill one from stager.empty_pinned(...), or "
                "put it"
            )
        return address
