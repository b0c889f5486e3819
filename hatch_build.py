"""Builds the engine's library into wheels, and beside its sources for editable installs."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("xferlib", "engine")
PORTABLE = bool(os.environ.get("XFERLIB_PORTABLE"))
"""For wheels that others install: made by Zig, whatever else is there."""


def _building(root: str) -> Any:
    spec = importlib.util.spec_from_file_location("xferlib_engine_building", Path(root) / FOLDER / "building.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class EngineHook(BuildHookInterface[Any]):
    """For wheels alone: a source distribution has the sources."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        building = _building(self.root)
        return [building.ZIG] if self.target_name == "wheel" and building.compiler(portable=PORTABLE) is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        building, sources = _building(self.root), Path(self.root) / FOLDER
        if version == "editable":
            building.build(sources, sources)
            return
        # Not where the checkout's own lies, which may be of another compiler.
        self._made = tempfile.TemporaryDirectory()
        command = building.compiler(portable=PORTABLE)
        portable = command is None or "ziglang" in command
        library = building.build(sources, Path(self._made.name), portable=portable)
        build_data["force_include"][str(library)] = str(FOLDER / library.name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{building.library_tag(library, portable=portable)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_made"):
            self._made.cleanup()
