"""How the type of a tree comes through a transfer. For type checkers; nothing here is asked at run time.

A class that names its parts (TypedDict, named tuple, dataclass, whatever else is a tree) comes out as itself, so that a misspelt
name is an error. Its fields read as declared, though they hold another library's arrays then: declare those as `Any`, or as what
both libraries have. The type of an array, or of a plain dict, list or tuple of arrays, names nothing but the library, and that
changes: `Any` comes out in place of what it holds, so that no sound program is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from xferlib.memory.arrays import Array

__all__ = ["HasDtype", "KeyT", "NamedT", "Sequences", "TreeT", "TreeT_co", "Unnamed"]


class NamesFields(Protocol):
    """A named tuple, which a checker would otherwise take for a plain tuple."""

    def _asdict(self) -> dict[str, Any]: ...


class HasDtype(Protocol):
    """An array of any library: what has a dtype is one for the trees of this library, too."""

    @property
    def dtype(self) -> Any: ...


Sequences: TypeAlias = list[Any] | tuple[Any, ...]
Unnamed: TypeAlias = Array | Sequences
KeyT = TypeVar("KeyT")
NamedT = TypeVar("NamedT", bound=NamesFields)
if TYPE_CHECKING:
    # Checkers have it without the package. An annotation with a bare `Transfer` means a transfer of anything.
    from typing_extensions import TypeVar as TypeVarOr

    TreeT = TypeVarOr("TreeT", default=Any)
    TreeT_co = TypeVarOr("TreeT_co", covariant=True, default=Any)
else:
    TreeT = TypeVar("TreeT")
    TreeT_co = TypeVar("TreeT_co", covariant=True)
