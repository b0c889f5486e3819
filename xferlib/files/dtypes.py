"""Which arrays of a file are converted once they are on the device, and to what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from xferlib.files.formats import EXTENSIONS, INSTALL
from xferlib.files.patterns import check_patterns, first_fit

__all__ = ["Conversions", "DtypeRule"]

DtypeRule: TypeAlias = "npt.DTypeLike | Mapping[str, npt.DTypeLike]"
"""One dtype for all arrays of floating point, or dtypes by patterns of names, of which the first that fits counts."""
FLOATS = frozenset(EXTENSIONS.values())


@final
class Conversions:
    """Which arrays of a load are converted on the device, and to which dtype, as its argument `dtype=` says."""

    def __init__(self, rule: DtypeRule | None) -> None:
        self._by_pattern: dict[str, np.dtype[Any]] = {}
        self._of_floats: np.dtype[Any] | None = None
        if isinstance(rule, Mapping):
            self._by_pattern = {pattern: _dtype(dtype) for pattern, dtype in rule.items()}
        elif rule is not None:
            self._of_floats = _dtype(rule)

    @property
    def targets(self) -> set[np.dtype[Any]]:
        """All that may come out."""
        return {*self._by_pattern.values(), *(() if self._of_floats is None else (self._of_floats,))}

    def check(self, names: Sequence[str]) -> None:
        """Raise `ValueError` for a pattern that has no effect on any of the names."""
        check_patterns("dtype", self._by_pattern, names)

    def of(self, name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return what an array of this name and dtype is to have."""
        if self._of_floats is not None:
            return self._of_floats if dtype.kind == "f" or dtype.name in FLOATS else dtype
        found = first_fit(self._by_pattern, name)
        return dtype if found is None else found


def _dtype(given: Any) -> np.dtype[Any]:
    if isinstance(given, str) and given in FLOATS:
        # NumPy knows these names once the package is imported.
        try:
            import ml_dtypes
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"dtype={given!r} is of ml_dtypes. {INSTALL}", name="ml_dtypes") from error
        given = getattr(ml_dtypes, given)
    if given is None:
        # NumPy takes it for float64.
        raise TypeError("dtype: None for a pattern of names. Leave the pattern out: what no pattern fits stays as it is")
    try:
        found: np.dtype[Any] = np.dtype(given)
    except TypeError as error:
        raise TypeError(f"dtype={given!r}: expected a dtype, or dtypes by patterns of names ({error})") from error
    return found
