"""How the site is built: `python -m sphinx -W --keep-going docs build/docs`.

What can be taken from the code is: the laws, their tests and the API are read from it at each build, so that they cannot drift.
"""

from __future__ import annotations

import tomllib
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import xferlib_jax
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.ext.autodoc.mock import mock
from sphinx.util.nodes import make_refnode

from xferlib.conformance import StagerConformance
from xferlib.protocol import LAWS

project = "xferlib"
author = "the xferlib authors"
version = release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "xferlib"
html_copy_source = False
html_show_copyright = False
# The site is read from disk, where a page cannot fetch others: each result of a search would be an error.
html_show_search_summary = False

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# Docstrings are plain text with names in single backticks: one that is public becomes a link, any other is code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}

# "auto" is an argument, not a quotation.
smartquotes = False

nitpicky = True
nitpick_ignore_regex = [
    # Any code may stand in single backticks. What has one in it is two that were not told apart, as in `Slot`s of a `Ring`.
    ("py:obj", "[^`]*"),
    ("py:class", r"(collections\.abc|_?ctypes|jax|numpy|os|pathlib)\..*"),
    ("py:class", r"(.*\.)?(_\w+|\w*T|\w*T_co|\w*T_contra)"),
    # What checkers are told of, and nobody imports.
    ("py:class", r"xferlib\.typed\..*"),
    # What an argument may be, which is said beside it.
    ("py:class", r"(.*\.)?(DtypeRule|Paths|Tell)"),
]

# JAX need not be installed for what is said of it.
with mock(["jax"]):
    for _module in ("_load", "_prefetch", "_narrowing", "_save", "_stagers"):
        _found = import_module(f"xferlib_jax.{_module}")
        for _name in set(xferlib_jax.__all__) & set(_found.__all__):
            setattr(xferlib_jax, _name, getattr(_found, _name))


class Laws(Directive):
    """The laws with what the suite asks of each: its tests are sentences."""

    def run(self) -> list[nodes.Node]:
        return [self._law(number, words) for number, words in LAWS.items()]

    def _law(self, number: int, words: str) -> nodes.section:
        title, _, meaning = words.partition(": ")
        section = nodes.section(ids=[f"law-{number}"], names=[f"law {number}"])
        section += nodes.title(text=f"{number}. {title}")
        if meaning:
            section += nodes.paragraph(text=f"{meaning[0].upper()}{meaning[1:]}.")
        tests = nodes.bullet_list()
        for name in sorted(name for name in dir(StagerConformance) if name.startswith(f"test_law{number:02d}_")):
            tests += nodes.list_item("", nodes.paragraph(text=name.removeprefix(f"test_law{number:02d}_").replace("_", " ")))
        section += tests
        return section


MADE_BY_USERS = {"Capabilities", "Charge", "MemoryEstimate", "Drain", "BackgroundIterator", "Ring", "SharedRing", "StagingProfile"}


def _signature(app: Any, kind: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """Show what a class is made from only where readers make one."""
    if kind == "class" and name.rpartition(".")[2] not in MADE_BY_USERS:
        return "", None
    return signature, returns


def _fields(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Show the fields that a class's docstring names as a list. In the code they are laid out for `help`."""
    if "Attributes:" not in lines:
        return
    start = lines.index("Attributes:") + 1
    end = next((n for n in range(start, len(lines)) if lines[n] and not lines[n].startswith("    ")), len(lines))
    listed = [f"  {line[4:].lstrip()}" if line.startswith("     ") else f"* {line[4:]}" for line in lines[start:end] if line]
    lines[start:end] = ["", *listed, ""]


def _public(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Find a name such as `Transfer.value`, or `xferlib.transfer.Transfer` in a signature, under the one it has on the page."""
    parts = node.get("reftarget", "").removesuffix("()").split(".")
    domain = env.domains["py"]
    for start, package in product(range(len(parts)), ("xferlib", "xferlib.protocol", "xferlib_jax")):
        name = ".".join([package, *parts[start:]])
        if name in domain.objects:
            found = domain.objects[name]
            return make_refnode(app.builder, node.get("refdoc", env.docname), found.docname, found.node_id, contnode, name)
    return None


def setup(app: Any) -> None:
    app.add_directive("laws", Laws)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _fields)
    app.connect("missing-reference", _public)
