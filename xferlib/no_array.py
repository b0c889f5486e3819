"""What is told to whoever takes a transfer for the arrays that it will have: the commonest mistake of all is to forget `value`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, final

__all__ = ["REFUSAL", "NoArray"]

REFUSAL = "a transfer is no array. Take its arrays with .value, or with .result(), which blocks until it is done"
OPERATIONS = "array getitem setitem len int float complex neg pos abs lt le gt ge"
OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor"
ATTRIBUTES = "shape dtype ndim size nbytes T mean sum min max astype reshape copy item keys values items"
"""What arrays and trees of them offer: operations, operators with two sides, and other attributes."""


class NoArray:
    """Refuses, with what to do, whatever an array or a tree of them would do. To `hasattr` it has no attribute of theirs."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """Say yes, as other objects do: `len()` is refused."""
        return True

    def __dir__(self) -> Iterable[str]:
        return sorted(set(super().__dir__()).difference(ATTRIBUTES.split()))


def _refuse(transfer: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(REFUSAL)


@final
class _Attribute:
    """One that arrays have, and a transfer has not."""

    def __get__(self, transfer: object, kind: object = None) -> NoReturn:
        raise AttributeError(REFUSAL)


# Entered here, and so hidden from type checkers, which refuse each by itself. No `__getattr__` instead: with one, every attribute
# of every transfer takes twice as long. `==` stays as it is, since it finds a transfer among others.
for _name in OPERATIONS.split():
    setattr(NoArray, f"__{_name}__", _refuse)
for _name in OPERATORS.split():
    setattr(NoArray, f"__{_name}__", _refuse)
    setattr(NoArray, f"__r{_name}__", _refuse)
for _name in ATTRIBUTES.split():
    setattr(NoArray, _name, _Attribute())
