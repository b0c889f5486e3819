"""JAX arrays over our memory, and what may be asked of the user's arrays.

Nothing is copied here, and nothing is ordered except by what the caller passes in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

import jax
import ml_dtypes
import numpy as np

from xferlib_jax._capsule import Capsules, Exporter

__all__ = [
    "FINALIZERS",
    "NARROWED",
    "NOT_MAPPED",
    "NO_FINALIZERS",
    "ArrayCheck",
    "JaxArray",
    "adopt",
    "check_class",
    "check_dtype",
    "dlpack_code",
    "kind_of",
    "nbytes_of",
    "shards_of",
]

JaxArray: TypeAlias = Any
"""`jax.Array`, which is also what a traced value claims to be."""

NOT_MAPPED: Final = (
    "gives the device no view of host memory. JAX's arrays never change, its computations copy what is in host memory before they "
    "read it, and it lets imported host memory go while such a copy is under way. Copy it with put"
)
"""Why `mapped` is off, on every platform: nobody could tell when the memory may be written again."""

FINALIZERS: Final = sys.version_info >= (3, 12)
"""Whether a finalizer that the collector runs may call JAX: from Python 3.12 on the collector never runs inside a call of JAX."""
NO_FINALIZERS: Final = (
    "cannot transfer in a finalizer that the garbage collector runs: before Python 3.12 that may be inside of a call of JAX, which "
    "does not survive another one. Transfer in ordinary code, or take Python 3.12"
)

INTEGER, UNSIGNED, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
_FLOAT8 = {
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
CODES: Final[dict[np.dtype[Any], tuple[int, int]]] = {
    np.dtype(np.bool_): (BOOL, 8),
    np.dtype(ml_dtypes.bfloat16): (BFLOAT, 16),
    **{np.dtype(getattr(ml_dtypes, name)): (code, 8) for name, code in _FLOAT8.items()},
    **{np.dtype(f"int{bits}"): (INTEGER, bits) for bits in (8, 16, 32, 64)},
    **{np.dtype(f"uint{bits}"): (UNSIGNED, bits) for bits in (8, 16, 32, 64)},
    **{np.dtype(f"float{bits}"): (FLOAT, bits) for bits in (16, 32, 64)},
    **{np.dtype(f"complex{bits}"): (COMPLEX, bits) for bits in (64, 128)},
}
"""DLPack's code and bits for every dtype of JAX whose items are whole bytes."""
NARROWED: Final = {np.dtype(wide): np.dtype(narrow) for wide, narrow in (("i8", "i4"), ("u8", "u4"), ("f8", "f4"), ("c16", "c8"))}
"""What JAX makes of 64-bit types unless these are turned on."""
DELETED: Final = "the array was deleted, by its delete() or by donating it to a function. Get it before, or get what that returned"
MOST_SHARDINGS = 64
"""How many shardings a stager remembers as being of its device."""
SUB_BYTE: Final = {
    np.dtype(getattr(ml_dtypes, name)): whole
    for name, whole in (
        *((name, "int8") for name in ("int2", "int4")),
        *((name, "uint8") for name in ("uint2", "uint4")),
        ("float4_e2m1fn", "bfloat16"),
    )
    if hasattr(ml_dtypes, name)
}


def check_dtype(dtype: np.dtype[Any]) -> bool:
    """Raise `TypeError` unless JAX arrays can have and keep this dtype. True: ask again, a switch of the thread decides."""
    if dtype in NARROWED:
        check_wide(dtype)
        return True
    if dtype in CODES:
        return False
    if dtype in SUB_BYTE:
        whole = SUB_BYTE[dtype]
        raise TypeError(
            f"JAX packs several items of {dtype} into a byte, NumPy does not, so they are not transferred. Transfer {whole} and "
            f"convert on the device: array.astype(jax.numpy.{dtype})"
        )
    raise TypeError(f"JAX has no arrays of dtype {dtype}. {_advice(dtype)}")


def check_wide(dtype: np.dtype[Any]) -> None:
    """Raise `TypeError` if the calling thread's JAX would narrow this 64-bit dtype."""
    if not jax.config.jax_enable_x64:
        raise TypeError(
            f"JAX would narrow {dtype} to {NARROWED[dtype]}: its 64-bit types are off. Convert first, array.astype("
            f'"{NARROWED[dtype]}"), or all batches of a loader, map(xferlib_jax.narrowed, loader); or turn 64-bit types on, '
            'jax.config.update("jax_enable_x64", True), or around this call by `with jax.enable_x64(True):`, where such arrays are '
            "made and read in a part of the program alone"
        )


def dlpack_code(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return DLPack's code and bits. Raises `TypeError` if the calling thread's JAX would narrow the dtype, which may change."""
    if dtype in NARROWED:
        check_wide(dtype)
    return CODES[dtype]


def adopt(
    capsules: Capsules,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    device: tuple[int, int],
    order: Callable[[Any], None] | None,
    lease: object,
) -> JaxArray:
    """Return an array over the memory, which starts at a multiple of 256, without a copy.

    JAX asks `order` to make one of its streams wait (None: JAX has no streams), and everything that reads the array waits for that
    stream. `lease` lives until JAX has let the buffer go.
    """
    code, bits = dlpack_code(dtype)
    return capsules.lend(address, shape, code, bits, device, lease, _import, device, order)


def _import(capsule: Any, device: tuple[int, int], order: Callable[[Any], None] | None) -> JaxArray:
    return jax.dlpack.from_dlpack(Exporter(capsule, device, order))


@final
class ArrayCheck:
    """Checks the user's arrays, for one device. Arrays in memory of one of `refused_kinds` are refused. Any thread.

    What depends only on an array's class, or on its sharding, is asked once for each: JAX takes microseconds to answer. All arrays
    that a compiled function returns in one place have the same sharding.
    """

    def __init__(self, device: Any, refused_kinds: tuple[str, ...] = ()) -> None:
        self._device = device
        self._devices = {device}
        self._refused_kinds = refused_kinds
        self._classes: set[type] = set()
        # By identity: a comparison might take any time.
        self._shardings: dict[int, Any] = {}

    def __call__(self, array: JaxArray) -> JaxArray:
        """Return the array or, if it is replicated, its copy on the device.

        Raises `TypeError` unless this is a JAX array with memory, `ValueError` unless all of it is there, on the device.
        """
        # Random keys have a dtype of JAX's own.
        if type(array) not in self._classes or not isinstance(array.dtype, np.dtype):
            check_class(array)
            self._classes.add(type(array))
        if array.is_deleted():
            raise ValueError(DELETED)
        sharding = array.sharding
        if self._shardings.get(id(sharding)) is not sharding:
            replicated = len(sharding.device_set) > 1 and sharding.is_fully_replicated and self._device in sharding.device_set
            if not replicated:
                _check_sharding(sharding, self._device)
            if sharding.memory_kind in self._refused_kinds:
                raise ValueError(
                    f"the array is in host memory ({sharding.memory_kind}) already. Look at it with numpy.asarray(array)"
                )
            if replicated:
                return shards_of(array)[self._device]
            if len(self._shardings) >= MOST_SHARDINGS:
                self._shardings.clear()
            self._shardings[id(sharding)] = sharding
        return array

    def accepts(self, arrays: Sequence[JaxArray]) -> bool:
        """Tell whether it raises for none of the arrays, in a fraction of the time. False: it may raise for one of them."""
        try:
            for array in dict(zip(map(type, arrays), arrays, strict=True)).values():
                self(array)
        except (TypeError, ValueError):
            return False
        dtypes = {id(dtype): dtype for dtype in [array.dtype for array in arrays]}.values()
        if not all(isinstance(dtype, np.dtype) for dtype in dtypes) or any(array.is_deleted() for array in arrays):
            return False
        # Each array may have a sharding of its own, though equal: to ask each takes less time than to compare them.
        shardings = [array.sharding for array in arrays]
        if any(sharding.device_set != self._devices for sharding in shardings):
            return False
        return not self._refused_kinds or all(sharding.memory_kind not in self._refused_kinds for sharding in shardings)


def shards_of(array: JaxArray) -> dict[Any, JaxArray]:
    """Return what an array has on each device of this process. Raises `ValueError` if another thread has just deleted it."""
    found = {}
    try:
        found = {shard.device: shard.data for shard in array.addressable_shards}
    except RuntimeError:
        if not array.is_deleted():
            raise
    # JAX may also say that there are none.
    if not found:
        raise ValueError(DELETED)
    return found


def check_class(array: object) -> None:
    """Raise `TypeError` unless this is a JAX array with memory."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{kind_of(array)} stands for an array inside a function that JAX traces, and has no memory. Call get outside of jit, "
            "grad and vmap, on what the function returns"
        )
    if not isinstance(array, jax.Array):
        advice = ""
        if isinstance(array, np.ndarray | np.generic | int | float | complex):
            advice = ". It is on the host already; put brings arrays of NumPy to the device"
        elif hasattr(type(array), "__dlpack__"):
            advice = ". Import arrays of other libraries with jax.dlpack.from_dlpack"
        raise TypeError(f"expected a jax.Array, got {kind_of(array)}{advice}")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{kind_of(array)} holds random keys, whose bytes are JAX's own matter. Get jax.random.key_data(keys)")


def _check_sharding(sharding: Any, device: Any) -> None:
    devices = sharding.device_set
    if len(devices) > 1 or not sharding.is_fully_addressable:
        raise ValueError(
            f"the array is spread over {len(devices)} devices, and this stager moves those of {device}, and replicated ones that "
            "have a copy there. Save it by xferlib_jax.save(path, tree), or get its shards, each by a stager of its device: "
            "[shard.data for shard in array.addressable_shards]"
        )
    (found,) = devices
    if found != device:
        raise ValueError(
            f"the array is on {found}, this stager on {device}. Open another with device=, counted as in jax.local_devices()"
        )


def nbytes_of(array: JaxArray) -> int:
    """Return how many bytes an array has. `array.nbytes` says the same, in three times the time."""
    nbytes: int = math.prod(array.shape) * array.dtype.itemsize
    return nbytes


def kind_of(thing: object) -> str:
    """Name a thing's type."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "mM":
        return "Transfer its integers: array.view('int64')"
    if dtype.kind in "fc":
        return "Convert to float32 or complex64 first: array.astype(...)"
    if dtype.kind in "OSUT":
        return "Text rides along in a list, array.tolist(), and other objects as xferlib.Host(array)"
    return "Transfer booleans, integers, floats or complex numbers"
