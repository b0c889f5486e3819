"""Building the engine's library: for the hook that makes wheels, which runs this file before anything is installed.

Nothing but the standard library is imported here. A library is written under another name and then renamed, and its name has the
hash of its sources and options. So whoever has an older one mapped keeps it, and environments that share a checkout share what they
build.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["HEADERS", "SOURCES", "ZIG", "build", "compiler", "library_name", "library_tag", "source_hash"]

SOURCES = ("engine.c", "copying.c", "context.c", "activity.c", "callbacks.c")
HEADERS = ("engine.h", "copying.h", "context.h", "activity.h", "callbacks.h")
OPTIONS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-s")
ZIG = "ziglang>=0.13"
"""The package that is a compiler if the system has none."""
OLDEST_GLIBC = (2, 17)
"""The oldest glibc that a library made by Zig runs on."""


def source_hash(folder: Path) -> str:
    """Return a hash of the sources and of how they are built: it tells one state of them from another.

    Raises `FileNotFoundError` if the sources are not there.
    """
    told = hashlib.sha256("\0".join(OPTIONS).encode())
    for name in (*SOURCES, *HEADERS):
        told.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return told.hexdigest()[:16]


def library_name(folder: Path) -> str:
    """Return the file name of the library of these sources."""
    return f"libxferlib-{source_hash(folder)}.so"


def compiler(*, portable: bool = False) -> list[str] | None:
    """Return the command of a C compiler; None: there is none. `portable`: the one whose libraries run on old systems."""
    system = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if system and not portable:
        return system.split()
    if importlib.util.find_spec("ziglang") is None:
        return None
    old = ".".join(map(str, OLDEST_GLIBC))
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.{old}"]


def build(folder: Path, target: Path, *, portable: bool = False) -> Path:
    """Build the library of the sources in a folder into another, unless it is there, and return it. Raises `RuntimeError`."""
    library = target / library_name(folder)
    if library.exists():
        return library
    command = compiler(portable=portable)
    if command is None:
        raise RuntimeError(f"there is no C compiler to build the engine with. Install gcc, or: pip install '{ZIG}'")
    sources = [str(folder / name) for name in SOURCES]
    told = f'-DXE_SOURCE_HASH="{source_hash(folder)}"'
    with tempfile.TemporaryDirectory(dir=target) as made:
        fresh = Path(made) / library.name
        done = subprocess.run([*command, *OPTIONS, told, *sources, "-o", str(fresh)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the engine could not be built by {' '.join(command)}:\n{done.stderr}")
        os.replace(fresh, library)
    return library


def library_tag(library: Path, *, portable: bool) -> str:
    """Return the platform tag of a wheel with this library. Raises `RuntimeError` if a portable one wants a newer system."""
    machine = platform.machine()
    if not portable:
        return f"linux_{machine}"
    newest = newest_glibc(library)
    if newest > OLDEST_GLIBC:
        raise RuntimeError(f"{library.name} wants glibc {newest}, and its wheel would say {OLDEST_GLIBC}")
    return "manylinux_{}_{}_{}".format(*OLDEST_GLIBC, machine)


def newest_glibc(library: Path) -> tuple[int, ...]:
    """Return the newest version of glibc that a library asks for."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))
