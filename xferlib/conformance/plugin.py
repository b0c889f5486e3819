"""A pytest plugin: the header that says what was tested, on what, and at the end a line for each law. A pasted log explains itself.

`xferlib conformance NAME` loads it; with pytest alone: `pytest -p xferlib.conformance.plugin --xferlib-backend NAME --pyargs ...`.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict
from importlib.metadata import packages_distributions, version

import pytest

from xferlib.conformance.verdicts import verdicts
from xferlib.errors import BackendUnavailableError
from xferlib.protocol import HostStager
from xferlib.registry import open_backend

__all__: list[str] = []

HEADER = pytest.StashKey[list[str]]()
OFF = pytest.StashKey[Collection[str]]()
"""The flags that are off."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--xferlib-backend", metavar="NAME", help="name of the installed backend that the header describes")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    name: str | None = config.getoption("--xferlib-backend")
    if name is None or config.option.collectonly:
        return
    try:
        config.stash[HEADER], config.stash[OFF] = _described(name)
    except BackendUnavailableError as error:
        # Raised once; a skip for every law would end in success.
        raise pytest.UsageError(f"nothing was tested: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    return config.stash.get(HEADER, [])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    # Behind everything that pytest says, where readers look for it.
    yield
    if config.getoption("--xferlib-backend") is None:
        return
    lines = verdicts(terminalreporter.stats, config.stash.get(OFF, ()))
    if lines:
        terminalreporter.write_sep("=", "laws")
    for line in lines:
        terminalreporter.write_line(line)


def _described(name: str) -> tuple[list[str], list[str]]:
    """Return the header's lines, and the flags that are off. Raises `BackendUnavailableError`."""
    loaded = _loaded_packages()
    backend = open_backend(name)
    try:
        header = [f"backend: {name} on {backend.device}", _capabilities(backend), _versions(loaded), _process()]
        return header, _flags(backend, False)
    finally:
        backend.close()


def _capabilities(backend: HostStager[object]) -> str:
    on, off = (", ".join(_flags(backend, wanted)) or "none" for wanted in (True, False))
    return f"capabilities: {on}; off: {off}"


def _flags(backend: HostStager[object], wanted: bool) -> list[str]:
    return [flag for flag, is_on in asdict(backend.capabilities).items() if is_on is wanted]


def _versions(before: set[str]) -> str:
    """Return our version, and those of the packages that opening the backend imported: its framework, whatever it is."""
    providers = packages_distributions()
    fresh = {name for package in _loaded_packages() - before for name in providers.get(package, ())}
    named = sorted({"xferlib", "numpy", "pytest"} | fresh, key=str.lower)
    return "versions: " + ", ".join(f"{name} {version(name)}" for name in named)


def _loaded_packages() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _process() -> str:
    return f"process: {os.getpid()}, Python {platform.python_version()}, {platform.platform()}"
