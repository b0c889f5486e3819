"""Who may import whom, and what the core may not name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "xferlib"

# A module may import modules of the core that stand further up only.
FLOORS = [
    {f"xferlib.{name}" for name in ("callers", "errors", "handles", "latch", "no_array", "tickets", "words")},
    {"xferlib.forks"},
    {"xferlib.engine", "xferlib.files", "xferlib.sketch", "xferlib.tracing", "xferlib.watchdog"},
    {"xferlib.files.temporary"} | {f"xferlib.tracing.{name}" for name in ("events", "intervals", "library")},
    {f"xferlib.tracing.{name}" for name in ("atomic", "collection", "gaps", "log", "records", "termination")},
    {"xferlib.gates", "xferlib.tracing.summary"},
    {"xferlib.engine.building"},
    {"xferlib.engine.native"},
    {"xferlib.daemon"},
    {"xferlib.reaper", "xferlib.uninterrupted"},
    {"xferlib.tracing.chrome", "xferlib.tracing.gpu", "xferlib.tracing.rows"},
    {"xferlib.tracing.page", "xferlib.tracing.picture"},
    {"xferlib.tracing.trace"},
    {"xferlib.tracing.__main__"},
    {"xferlib.protocol", "xferlib.workload"},
    {"xferlib.tree", "xferlib.memory.arrays", "xferlib.memory.limits", "xferlib.memory.ranges"},
    {"xferlib.memory.foreign"},
    {"xferlib.engine.cores", "xferlib.engine.jobs", "xferlib.in_flight"},
    {"xferlib.engine.dispatcher", "xferlib.memory.mapped"},
    {"xferlib.pending"},
    {"xferlib.ledger"},
    {"xferlib.cuda", "xferlib.cuda.driver", "xferlib.cuda.refusals", "xferlib.cuda.streams"},
    {"xferlib.cuda.context", "xferlib.cuda.fences"},
    {"xferlib.debug", "xferlib.typed"},
    {f"xferlib.memory.{name}" for name in ("blocks", "idle_blocks", "numa", "proc_maps", "table")},
    {"xferlib.memory.segments"},
    {"xferlib.memory.locker", "xferlib.memory.pages"},
    {"xferlib.checks", "xferlib.memory.device_pool", "xferlib.memory.pinned_pool", "xferlib.stats"},
    {"xferlib.engine.lanes", "xferlib.memory.registered", "xferlib.transfer"},
    {"xferlib.memory.host"},
    {"xferlib.packing", "xferlib.pageable_warning"},
    {"xferlib.staging.coalesce", "xferlib.staging.profile"},
    {"xferlib.staging.bounce", "xferlib.staging.small_gets"},
    {"xferlib.staging.pageable"},
    {"xferlib.byte_reader"},
    {"xferlib.d2h", "xferlib.h2d", "xferlib.resources"},
    {"xferlib.stager"},
    {f"xferlib.pipeline.{name}" for name in ("failed", "memory_users", "one_pass", "stacking", "unshared")},
    {
        f"xferlib.pipeline{part}"
        for part in ("", ".memory_estimate", ".phase_timer", ".completion", ".report", ".output_writer", ".workers.layout")
    },
    {f"xferlib.pipeline.workers{part}" for part in ("", ".channel", ".memory", ".messages", ".slots")},
    {"xferlib.pipeline.workers.process"},
    {"xferlib.pipeline.workers.pool", "xferlib.pipeline.workers.worker"},
    {"xferlib.pipeline.workers.run"},
    {"xferlib.pipeline.workers.shared_ring"},
    {f"xferlib.pipeline.{name}" for name in ("host_tree", "ring", "source_thread")},
    {"xferlib.pipeline.background"},
    {"xferlib.pipeline.prefetch"},
    {"xferlib.pipeline.drain"},
    {"xferlib.pipeline.drained"},
    {"xferlib.pipeline.stream_map"},
    {"xferlib.files.names", "xferlib.files.patterns"},
    {"xferlib.files.formats", "xferlib.files.series"},
    {"xferlib.files.ahead", "xferlib.files.locked_pages", "xferlib.files.dtypes", "xferlib.files.progress"},
    {"xferlib.files.readers"},
    {"xferlib.files.shards"},
    {"xferlib.files.plan", "xferlib.files.regions", "xferlib.registry"},
    {"xferlib.files.sharded"},
    {"xferlib.files.outcome", "xferlib.files.pace"},
    {"xferlib.files.writing"},
    {"xferlib.files.load", "xferlib.files.pinned_files", "xferlib.files.save"},
    {"xferlib.overlap"},
    {"xferlib.overlap.overlap_report", "xferlib.overlap.calls"},
    {f"xferlib.overlap.{name}" for name in ("happens_before", "libcuda", "measure", "parameters")},
    {"xferlib.overlap.causes"},
    {"xferlib.overlap.verdict"},
    {"xferlib.overlap.callbacks"},
    {"xferlib.overlap.hold"},
    {"xferlib.overlap.loops"},
    {"xferlib"},
]
LIBRARIES = {"numpy", "optree", "psutil"}
MORE_LIBRARIES = {
    "cli": {"rich", "typer", "click", "PIL", "matplotlib"},
    "files": {"safetensors", "ml_dtypes", "rich"},
    # For type checkers alone, which bring it.
    "typed.py": {"typing_extensions"},
    "tracing": {"cuda", "matplotlib"},
    "conformance": {"pytest", "_pytest", "cuda", "cupti", "ml_dtypes"},
}
CUDA = {f"xferlib.cuda.{name}" for name in ("context", "driver", "fences", "refusals", "streams")}
"""For backends: nothing else of the core uses it."""
MOST_LINES_ALIKE = 8
OF_ONE_HOME = {"libcuda.so.1", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "__cuda_stream__", "/proc/self/maps"}
"""Backends have what uses these from the core."""
OF_TWO_FACES = {
    "Event": "a point in a stream; in a trace, something that took time",
    "Mark": "for hooks, a point in a stream; in a page, what is drawn as one",
}
"""Names that stand for two classes, which different people meet: see `test_a_name_stands_for_one_class`."""
FRAMEWORKS = re.compile(r"\b(cupy|numba|jax)\b", re.IGNORECASE)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def floor(module: str) -> int:
    for height, modules in enumerate(FLOORS):
        if module in modules:
            return height
    return len(FLOORS)


core_files = sorted(CORE.rglob("*.py"))
backend_files = sorted((ROOT / "backends").rglob("*.py"))
benchmark_files = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", core_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_module_imports_only_what_stands_above_it(path: Path) -> None:
    module = module_name(path, ROOT)
    part = path.relative_to(CORE).parts[0]
    for imported in imports(path):
        package = imported.split(".")[0]
        if package == "xferlib":
            if part not in ("cli", "conformance", "__main__.py"):
                assert floor(imported) < floor(module), f"{module} imports {imported}"
            elif part == "conformance":
                assert imported.split(".")[1] in {
                    "byte_reader",
                    "conformance",
                    "errors",
                    "gates",
                    "protocol",
                    "reaper",
                    "registry",
                    "stager",
                    "stats",
                    "tracing",
                    "transfer",
                    "watchdog",
                    "words",
                }, imported
        elif package not in sys.stdlib_module_names:
            assert package in LIBRARIES | MORE_LIBRARIES.get(part, set()), f"{module} imports {imported}"


@pytest.mark.parametrize("path", core_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_backends_on_cuda_need_alike_serves_them_alone(path: Path) -> None:
    if path.relative_to(CORE).parts[0] != "cuda":
        assert not [name for name in imports(path) if name == "xferlib.cuda" or name.startswith("xferlib.cuda.")]


def test_every_module_of_the_core_has_a_floor() -> None:
    plain = {module_name(path, ROOT) for path in core_files if path.relative_to(CORE).parts[0] not in ("cli", "conformance")}
    named = set().union(*FLOORS)
    assert plain - named - {"xferlib.__main__", "xferlib.memory", "xferlib.staging"} == set()
    assert named - plain == set()


@pytest.mark.parametrize("path", core_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_names_no_framework(path: Path) -> None:
    assert not FRAMEWORKS.findall(path.read_text())


def test_a_name_stands_for_one_class() -> None:
    """Or for one type alias. An underscore in front makes no other name."""
    names = [name.lstrip("_") for path in core_files for name, node in defined(path).items() if names_a_type(node)]
    assert len(names) > 300
    assert {name for name, count in Counter(names).items() if count > 1} == set(OF_TWO_FACES)


def test_a_name_stands_for_one_file() -> None:
    files = [path.stem for path in core_files if not path.stem.startswith("__")]
    assert len(files) > 180
    assert [name for name, count in Counter(files).items() if count > 1] == []


def test_what_a_forked_child_is_told_is_said_in_one_place() -> None:
    said = [str(path.relative_to(CORE)) for path in core_files if "process was forked after" in path.read_text()]
    assert said == ["forks.py"]


def test_no_container_runs_python_when_something_in_it_goes() -> None:
    """An interrupt that came there would be reported and forgotten: see `xferlib.tickets.Alive`."""
    weak = re.compile(r"\b(WeakSet|WeakKeyDictionary|WeakValueDictionary|WeakMethod|finalize)\(")
    found = {str(path.relative_to(ROOT)) for path in [*core_files, *backend_files] if weak.search(path.read_text())}
    # A save has a finalizer in Python in any case.
    assert found == {"xferlib/files/outcome.py"}


@pytest.mark.parametrize("path", [*core_files, *backend_files], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_list_is_made_of_pairs_that_others_change_meanwhile(path: Path) -> None:
    """On Python 3.11 the collector may run between any two of the pairs, and then other threads, too. A copy is one step."""
    assert not re.search(r"\b(list|tuple|set|sorted)\([\w.\[\]\"']*(?<!copy\(\))\.items\(\)\)", path.read_text())


@pytest.mark.parametrize("path", backend_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_backend_imports_only_the_contract(path: Path) -> None:
    package = path.relative_to(ROOT / "backends").parts[0]
    names = (
        "protocol",
        "errors",
        "handles",
        "latch",
        "memory.proc_maps",
        "reaper",
        "tickets",
        "tracing.events",
        "tracing.log",
        "tree",
        "typed",
        "uninterrupted",
    )
    allowed = {"xferlib", *(f"xferlib.{name}" for name in names), *CUDA}
    if path.stem == "conformance":
        allowed |= {"xferlib.conformance", "xferlib.gates"}
    if path.stem == "workload":
        allowed |= {"xferlib.workload"}
    for imported in imports(path):
        if imported.split(".")[0] == "xferlib":
            assert any(imported == name or imported.startswith(name + ".conformance") for name in allowed) or (
                path.stem == "conformance" and imported.startswith("xferlib.conformance.")
            ), f"{path.name} imports {imported}"
        elif imported.startswith("xferlib_"):
            assert imported.split(".")[0] == package, f"{path.name} imports {imported} of another backend"


def defined(path: Path) -> dict[str, ast.stmt]:
    """Return what a module defines at its top level, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found |= dict.fromkeys((name.id for name in names), node)
    return found


def names_a_type(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) or (isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias")


def exported(path: Path) -> set[str]:
    node = defined(path)["__all__"]
    assert isinstance(node, ast.Assign)
    return set(ast.literal_eval(node.value))


cuda_files = [path for path in backend_files if path.parent.name in ("xferlib_cupy", "xferlib_jax", "xferlib_numba")]


@pytest.mark.parametrize("path", cuda_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_backend_has_again_what_backends_on_cuda_need_alike(path: Path) -> None:
    shared = set().union(*map(exported, (CORE / "cuda").glob("[!_]*.py")))
    assert len(shared) > 10
    assert not shared & set(defined(path))
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Constant) and node.value in OF_ONE_HOME), ast.unparse(node)
        assert not (isinstance(node, ast.Attribute) and node.attr in OF_ONE_HOME), ast.unparse(node)


def test_no_two_backends_have_the_same_function_or_class() -> None:
    """What is longer than a few lines, whatever it is called."""
    homes: dict[str, set[str]] = {}
    for path in backend_files:
        for node in defined(path).values():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                node.name = "it"
                for inner in ast.walk(node):
                    if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
                        inner.body[0:1] = []
                text = ast.unparse(node)
                if len(text.splitlines()) > MOST_LINES_ALIKE:
                    homes.setdefault(text, set()).add(path.parent.name)
    assert len(homes) > 50
    assert [text for text, packages in homes.items() if len(packages) > 1] == []


def test_backend_takes_only_submodules_of_the_contract_from_the_package() -> None:
    for path in backend_files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "xferlib":
                assert {alias.name for alias in node.names} <= {"protocol", "errors"}, path


@pytest.mark.parametrize("path", benchmark_files, ids=lambda path: str(path.relative_to(ROOT)))
def test_benchmark_uses_public_names_only(path: Path) -> None:
    for imported in imports(path):
        assert not imported.startswith("xferlib."), f"{path.name} imports {imported}"


def test_importing_the_package_loads_no_framework_no_backend_and_no_pytest() -> None:
    program = (
        "import sys, xferlib; xferlib.backends(); "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('cupy', 'numba', 'jax', 'jaxlib', 'torch', 'pytest', 'rich', 'typer') or m.startswith('xferlib_')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_plugin_of_pytest_imports_pytest_alone_until_a_fixture_is_asked_for() -> None:
    for node in ast.parse((ROOT / "_xferlib_pytest.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                assert name is not None
                assert name == "pytest" or name.split(".")[0] in sys.stdlib_module_names, name


def test_package_exports_what_it_imports_and_nothing_else() -> None:
    tree = ast.parse((CORE / "__init__.py").read_text())
    docstring, hidden, *imported, names, aliases = tree.body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(hidden, ast.ImportFrom)
    exported: list[str] = []
    for node in imported:
        assert isinstance(node, ast.ImportFrom)
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]
        exported += [alias.name for alias in node.names]
    assert isinstance(names, ast.Assign)
    assert ast.literal_eval(names.value) == sorted(exported)
    # What was public once.
    assert isinstance(aliases, ast.If)
