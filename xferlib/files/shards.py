"""Which files a path stands for, and which arrays are in which: one file, several, a pattern, or an index.

An index is what Hugging Face writes beside the files of one model: https://huggingface.co/docs/safetensors/index, and it may come
from strangers: it names files of its own folder only.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias, final

from xferlib.files.formats import SUFFIXES
from xferlib.files.readers import Reader, opened, read_json, shown

__all__ = ["Paths", "Selection", "select"]

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
INDEX = ".json"
WEIGHTS = "weight_map"
"""The entry of an index that has the file of each array."""
PATTERN = frozenset("*?[")
"""What is in the name of a file that stands for several."""
SUBTREE = "."
"""What a name ends in that stands for all names that begin with it."""
COMPARED = 2000
"""Names among which one is looked for that was meant."""
SHOWN = 8
"""Names in one error."""


@final
class Selection(NamedTuple):
    """What is to be loaded. `shown`: what the caller called all of it, as errors show it. `known`: the names of all there is."""

    shown: str
    arrays: dict[str, Reader]
    """By name, in the order of the result."""
    readers: list[Reader]
    is_unnamed: bool
    """Whether it is one array without a name."""
    known: Sequence[str]


def select(paths: Paths, names: Sequence[str] | None, files: ExitStack) -> Selection:
    """Open what a path stands for, and find these arrays in it; None: all. `files` closes it.

    A file whose array has no name gives that, whatever the names. Raises `ValueError` for names that are not there or in two files,
    and for an index that does not fit its files; `OSError`.
    """
    match paths:
        case str() | os.PathLike():
            file = Path(paths)
        case bytes():
            raise TypeError(f"{paths!r} is bytes: expected a path as text, such as os.fsdecode makes of it")
        case Iterable():
            return _several("the files", [_one_of_several(path) for path in paths], names, files)
        case _:
            advice = ". Pass the path that its result() returns" if hasattr(paths, "result") else ""
            raise TypeError(f"{paths!r}: expected a path, or several{advice}")
    if PATTERN & set(str(file)) and not file.exists():
        return _several(shown(file), _matching(file), names, files)
    if file.suffix.lower() == INDEX:
        return _indexed(file, names, files)
    if file.suffix.lower() not in SUFFIXES and file.is_dir():
        advice = f"Pass its index, such as {str(file / 'model.safetensors.index.json')!r}, or {str(file / '*.safetensors')!r}"
        raise IsADirectoryError(errno.EISDIR, f"it is a folder. {advice}", str(file))
    reader = files.enter_context(opened(file))
    if file.suffix.lower() == ".npy":
        return Selection(shown(file), dict.fromkeys(reader.names, reader), [reader], True, reader.names)
    chosen = _chosen(shown(file), reader.names, names, [reader])
    return Selection(shown(file), dict.fromkeys(chosen, reader), [reader], False, reader.names)


def _one_of_several(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{path!r} among the paths: expected a path")
    file = Path(path)
    if file.suffix.lower() == INDEX:
        raise ValueError(f"{shown(file)} among several paths: an index says itself which files there are. Pass it alone")
    return file


def _matching(pattern: Path) -> list[Path]:
    # A folder that is there is meant, whatever signs its own name has.
    folder = pattern.parent
    found = sorted(glob.glob(str((Path(glob.escape(str(folder))) if folder.exists() else folder) / pattern.name)))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no file has a name of this pattern", str(pattern))
    return [_one_of_several(path) for path in found]


def _several(said: str, paths: Sequence[Path], names: Sequence[str] | None, files: ExitStack) -> Selection:
    if not paths:
        raise ValueError("there is no path to load: the list is empty")
    readers = [files.enter_context(opened(_with_names(path))) for path in paths]
    found: dict[str, Reader] = {}
    for reader in readers:
        for name in reader.names:
            if name in found:
                raise ValueError(
                    f"{name!r} is in {shown(found[name].file)} and in {shown(reader.file)}. Load one of them by itself"
                )
            found[name] = reader
    return Selection(said, {name: found[name] for name in _chosen(said, list(found), names, readers)}, readers, False, list(found))


def _with_names(file: Path) -> Path:
    if file.suffix.lower() == ".npy":
        raise ValueError(f"{shown(file)} among several files: its array has no name. Load it by itself")
    return file


def _indexed(file: Path, names: Sequence[str] | None, files: ExitStack) -> Selection:
    weights = read_json(file).get(WEIGHTS)
    if not isinstance(weights, dict):
        raise ValueError(f"{shown(file)} is no index: it has no {WEIGHTS!r} with the file of each array")
    wanted = _chosen(shown(file), list(weights), names)
    promised: dict[str, list[str]] = {}
    for name in wanted:
        if not isinstance(weights[name], str):
            raise ValueError(f"{shown(file)} is damaged: it has {weights[name]!r} as the file of {name!r}")
        promised.setdefault(weights[name], []).append(name)
    places = {said: _inside(file, told[0], said) for said, told in promised.items()}
    readers: dict[str, Reader] = {}
    for said, place in places.items():
        try:
            readers[said] = files.enter_context(opened(place))
        except FileNotFoundError as error:
            why = f"it is missing, and {shown(file)} says that it has {promised[said][0]!r}"
            raise FileNotFoundError(errno.ENOENT, why, str(place)) from error
    for said, reader in readers.items():
        for name in _lacking(promised[said], reader.names):
            raise ValueError(f"{shown(file)} says that {shown(reader.file)} has {name!r}, and it has not")
        # Whoever names what to load need not care for the rest.
        for name in _lacking(reader.names, promised[said] if names is None else reader.names):
            raise ValueError(f"{shown(reader.file)} has {name!r}, which {shown(file)} {_said_of(name, weights)}. {UNINDEXED}")
    arrays = {name: readers[weights[name]] for name in wanted}
    return Selection(shown(file), arrays, list(readers.values()), False, list(weights))


UNINDEXED = "Say with names= what to load, or load the files by a pattern"


def _said_of(name: str, weights: Mapping[str, object]) -> str:
    return f"says is in {weights[name]!r}" if name in weights else "does not name"


def _lacking(names: Iterable[str], there: Iterable[str]) -> Iterator[str]:
    known = set(there)
    return (name for name in names if name not in known)


def _inside(index: Path, name: str, file: str) -> Path:
    """Return the path of a file that an index names. It may be a link, as in caches of downloads: the link is the user's own."""
    parts = PurePosixPath(file).parts
    if not parts or parts[0].startswith("/") or ".." in parts or not _is_path(file):
        raise ValueError(
            f"{shown(index)} says that {name!r} is in {file!r}, which is outside of the index's folder. Do not trust it"
        )
    place = index.parent / file
    if place.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{shown(index)} says that {name!r} is in {file!r}, which is no .safetensors or .npz file")
    return _with_names(place)


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _chosen(said: str, found: Sequence[str], wanted: Sequence[str] | None, readers: Sequence[Reader] = ()) -> list[str]:
    """Return the names of arrays that are wanted. `readers`: whose values may have a name that no array has."""
    if wanted is None:
        return list(found)
    known = set(found)
    chosen: dict[str, Any] = {}
    for name in wanted:
        if name in known:
            chosen[name] = None
            continue
        below = [other for other in found if other.startswith(name)] if isinstance(name, str) and name.endswith(SUBTREE) else []
        if not below:
            for value in [values[name] for reader in readers if name in (values := reader.values())]:
                advice = f"Load it by like=, with a value of type {type(value).__qualname__} in its place"
                raise ValueError(f"{said} has no array {_named(name)}: {reprlib.repr(value)} rode along under that name. {advice}")
            raise ValueError(f"{said} has no array {_named(name)}. {_hint(name, found)}")
        chosen |= dict.fromkeys(below)
    return list(chosen)


def _named(name: object) -> str:
    subtree = isinstance(name, str) and name.endswith(SUBTREE)
    return f"whose name begins with {name!r}" if subtree else f"named {name!r}"


def _hint(name: object, found: Sequence[str]) -> str:
    if any(other.startswith(f"{name}{SUBTREE}") for other in found):
        return f"Did you mean {f'{name}{SUBTREE}'!r}, which stands for all below it?"
    start = str(name)[: len(str(name)) // 2]
    # Comparing names takes a tenth of a millisecond each, and there may be a hundred thousand.
    likely = [other for other in found if other.startswith(start)] or found
    close = difflib.get_close_matches(str(name), likely[:COMPARED], n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    names = [repr(other) for other in found[:SHOWN]]
    left = len(found) - SHOWN
    return f"It has {', '.join(names) or 'nothing'}" + (f" and {left} more" if left > 0 else "")
