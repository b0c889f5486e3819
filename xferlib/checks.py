"""Checks of what users pass, before anything starts: clear errors that say what was expected and what to do."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, TypeVar

import numpy as np
from numpy.ma import MaskedArray

from xferlib.errors import CapabilityError, XferError
from xferlib.no_array import REFUSAL, NoArray
from xferlib.protocol import HostStager
from xferlib.tree import Mixed, ShapeDtype, Spec, note_place, rides_along
from xferlib.uninterrupted import collects

__all__ = [
    "check_alike",
    "check_apart",
    "check_iterable",
    "check_like_array",
    "check_out",
    "checked_at",
    "flag",
    "lacking",
    "package_of",
    "positive_nbytes",
    "refuse_bare_zero",
    "refuse_finalizers",
    "shorten",
    "timeout_seconds",
    "translated",
    "uncopied",
    "whole_number",
    "whole_shape",
    "without_arrays",
]

ARRAYS_OFFER = {"shape", "dtype", "__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__"}
"""Whatever has one of these may be an array of some library."""

T = TypeVar("T")

CHECKS = {f"xferlib.{name}" for name in ("checks", "handles", "memory.arrays", "pipeline.workers.layout", "tree")}
"""Modules that refuse wrong arguments of users."""


def refuse_bare_zero(stream: object | None) -> None:
    """Raise `ValueError` for the int 0: some frameworks mean "synchronous" by it, others the default stream."""
    if type(stream) is int and stream == 0:
        raise ValueError("stream=0 is ambiguous. Pass the framework's own object for its default stream, or leave stream out")


def shorten(error: Exception, package: str | None = None) -> None:
    """Leave two of our frames in the traceback of a refusal: the caller's, which catches it, and the one that raised it.

    This is done only if a check or code of `package` raised it. For any other error every frame is wanted.
    """
    door = last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if door is None or last is None or door is last:
        return
    name = str(last.tb_frame.f_globals.get("__name__", ""))
    if name in CHECKS or name.partition(".")[0] == package:
        door.tb_next = last


def package_of(backend: object) -> str:
    """Return the name of the package that a backend is in."""
    return type(backend).__module__.partition(".")[0]


def lacking(backend: HostStager[Any], flag: str, consequence: str) -> CapabilityError:
    """Return the error for a capability whose flag is off, in the backend's own words if it has some."""
    words = getattr(backend, "refusals", {}).get(flag, consequence)
    return CapabilityError(f"backend {backend.name!r} {words}")


def refuse_finalizers(backend: HostStager[Any]) -> None:
    """Raise `CapabilityError` in a finalizer that the collector runs, if the framework does not survive being called there."""
    if not backend.capabilities.finalizers and collects():
        consequence = "cannot transfer in a finalizer that the garbage collector runs. Transfer in ordinary code"
        raise lacking(backend, "finalizers", consequence)


def uncopied(advice: str) -> Callable[[Any, SupportsIndex], NoReturn]:
    """Return a `__reduce_ex__` that refuses and says what to do instead. `copy.copy`, `copy.deepcopy` and pickle all call it.

    It is for objects that stand for memory, threads or work under way: a copy would end them a second time.
    """

    def refuse(self: Any, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled. {advice}")

    return refuse


@contextmanager
def translated(failures: tuple[type[Exception], ...], words: str) -> Iterator[None]:
    """Raise `XferError` in place of a failure of the backend that no narrower class of ours stands for."""
    try:
        yield
    except XferError:
        raise
    except failures as error:
        raise XferError(f"{words}: {error}") from error


def checked_at(spec: Spec, index: int, check: Callable[[Any], T], leaf: Any) -> T:
    """Check a leaf; an error says where in the tree it stands."""
    try:
        return check(leaf)
    except (TypeError, ValueError) as error:
        note_place(error, spec, index)
        raise


def check_alike(given: ShapeDtype, expected: ShapeDtype) -> None:
    """Raise `ValueError` unless the device array that `into` names has the expected shape and dtype."""
    if given[0] != expected[0]:
        raise ValueError(f"into has the wrong shape: expected {expected[0]}, got {given[0]}")
    if given[1] != expected[1]:
        raise ValueError(
            f"into is of dtype {given[1]}, and what is put into it of dtype {expected[1]}. Nothing is converted on the way: "
            f"put array.astype({str(given[1])!r})"
        )


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise `TypeError` or `ValueError` unless a copy of this shape and dtype may be written to `out` as it lies."""
    if not isinstance(out, np.ndarray) or isinstance(out, MaskedArray):
        raise TypeError(
            f"out: expected a NumPy array, got {type(out).__module__}.{type(out).__qualname__}. Pass numpy.empty(shape, dtype), or "
            "no out at all"
        )
    if out.shape != shape:
        raise ValueError(f"out has the wrong shape: expected {shape}, got {out.shape}")
    if out.dtype != dtype:
        raise ValueError(
            f"out has the wrong dtype: expected {dtype}, got {out.dtype}. Nothing is converted on the way: convert it afterwards"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only. Pass an array that may be written")
    if not out.flags.c_contiguous:
        raise ValueError("out is not contiguous in C order. Pass numpy.empty(shape, dtype) and copy from it afterwards")


def check_like_array(leaf: object) -> None:
    """Raise `TypeError` for what is an array to nobody, and does not ride along either: a function, mostly.

    Of anything else the backend knows better what it is.
    """
    kind = type(leaf)
    # Not `dir`, nor `isinstance` below: a class may answer them as it likes, or not at all.
    offered, is_class = set(type.__dir__(kind)), issubclass(kind, type)
    if rides_along(kind) or issubclass(kind, list | tuple) or offered & ARRAYS_OFFER:
        return
    # One object may have what its class has not. Of a class itself this says nothing.
    if not is_class and any(hasattr(leaf, name) for name in ARRAYS_OFFER):
        return
    if {"result", "done"} <= offered:
        advice = "Pass what its result() returns"
    elif "__next__" in offered:
        advice = "A loop gets what a source gives: xferlib.drain(results, stager)"
    elif callable(leaf):
        advice = "Pass what it returns, or leave it out of the tree"
    else:
        advice = "Leave it out of the tree"
    # What Python calls a routine may have no name, such as a cached property.
    name = getattr(leaf, "__qualname__", None)
    if is_class:
        what = f"the class {name}"
    elif inspect.isroutine(leaf) and isinstance(name, str):
        what = f"the function {name}"
    else:
        what = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(
        f"expected a device array, got {what}, which is neither an array nor something that rides along, such as text and numbers. "
        f"{advice}"
    )


def without_arrays(tree: object, spec: Spec, expected: str, others: str) -> ValueError:
    """Return the error for a tree without arrays, with what to do. `others`: what to do where it has other leaves."""
    if tree is None:
        advice = "None is what a function gives that returns nothing"
    elif isinstance(spec, Mixed):
        advice = others
    else:
        advice = "There is nothing to copy: leave it out"
    return ValueError(f"there is no array in {reprlib.repr(tree)}: expected {expected}, or a tree of them. {advice}")


def check_apart(ranges: list[tuple[int, int]], name: str) -> None:
    """Raise `ValueError` if two of the (address, nbytes) overlap."""
    ordered = sorted(part for part in ranges if part[1])
    for (start, nbytes), (following, _) in itertools.pairwise(ordered):
        if following < start + nbytes:
            raise ValueError(f"two arrays of {name} share memory: each needs its own")


def check_iterable(given: object, name: str) -> None:
    """Raise `TypeError`, naming the argument, unless a loop can go over it."""
    if isinstance(given, NoArray):
        raise TypeError(f"{name}: expected something to iterate, one tree of arrays after another, got a transfer: {REFUSAL}")
    if isinstance(given, str | bytes):
        raise TypeError(f"{name}={reprlib.repr(given)}: expected something to iterate, one tree of arrays after another, got text")
    if isinstance(given, np.ndarray) and not given.ndim:
        raise TypeError(f"{name}: expected something to iterate, got an array of shape (). Pass a list of it, [array]")
    if not isinstance(given, type) and (hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        return
    call = getattr(given, "__name__", "it") if callable(given) else None
    advice = "" if call is None else f". It may be a function that makes one: call it, as in {call}()"
    raise TypeError(f"{name}: expected something to iterate, got {given!r}{advice}")


def flag(given: object, name: str) -> bool:
    """Return a bool, or raise `TypeError`, naming the argument: the text "no" would mean yes."""
    if not isinstance(given, bool | np.bool_ | int):
        raise TypeError(f"{name}={given!r}: expected True or False")
    return bool(given)


def timeout_seconds(given: object) -> float:
    """Return for how many seconds to wait. Raises `TypeError` and `ValueError`."""
    if isinstance(given, SupportsFloat):
        try:
            seconds = float(given)
        except OverflowError:
            # Of a very large int.
            seconds = math.inf
        if not math.isnan(seconds):
            return seconds
    error = ValueError if isinstance(given, SupportsFloat) else TypeError
    raise error(f"timeout={given!r}: expected seconds, or None to wait for as long as it takes")


def whole_number(given: object, name: str, *, least: int) -> int:
    """Return an int of at least this size, or raise `TypeError` or `ValueError`, naming the argument."""
    number = _as_int(given)
    if number is None:
        raise TypeError(f"{name}={given!r}: expected a whole number")
    if number < least:
        raise ValueError(f"{name}={given!r}: expected {least} or more")
    return number


def _as_int(given: Any) -> int | None:
    """Return a whole number as an int; None: it is none, as no bool is, and no array of several."""
    try:
        # NumPy's truths are numbers to older versions of it.
        return None if isinstance(given, bool | np.bool_) else operator.index(given)
    except TypeError:
        return None


def whole_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the shape as a tuple of ints that are not negative. Raises `TypeError` for what is no shape."""
    try:
        several: Any = shape if isinstance(shape, Sequence) or (isinstance(shape, np.ndarray) and shape.ndim) else (shape,)
        sizes = tuple(operator.index(n) for n in several)
    except TypeError:
        raise TypeError(f"shape={shape!r}: expected a whole number, or several. The shape comes first, the dtype second") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"negative dimensions are not allowed: {shape!r}")
    return sizes


def positive_nbytes(nbytes: int, name: str) -> int:
    """Return a limit in bytes, or raise `TypeError` or `ValueError`, naming the argument."""
    whole = _as_int(nbytes)
    if whole is None:
        raise TypeError(f"{name} is a whole number of bytes, got {nbytes!r}")
    if whole <= 0:
        raise ValueError(f"{name} is a number of bytes greater than 0, got {nbytes!r}")
    return whole
