"""Which files make an area, and which tests judge it: those of the file that is broken first, then the area's."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import final

from tests.mutation.tree import ROOT

__all__ = ["AREAS", "Area"]

Targets = tuple[str, ...]


@final
@dataclass(frozen=True)
class Area:
    """Patterns of files, without those that match `but`; `first`: by pattern, what judges such a file before the other tests."""

    files: Targets
    tests: Targets
    first: dict[str, Targets] = field(default_factory=dict)
    but: Targets = ()

    def paths(self) -> list[str]:
        """Return the files, in a fixed order."""
        found = {str(path.relative_to(ROOT)) for pattern in self.files for path in ROOT.glob(pattern)}
        return sorted(path for path in found if not any(fnmatch.fnmatch(path, pattern) for pattern in self.but))

    def targets(self, path: str) -> list[str]:
        """Return what judges a file, in the order in which it is run."""
        first = [target for pattern, targets in self.first.items() if fnmatch.fnmatch(path, f"*{pattern}") for target in targets]
        return list(dict.fromkeys([*first, *self.tests]))


def folder(parent: str, *names: str) -> Targets:
    return tuple(f"tests/{parent}/test_{name}.py" for name in names)


def core(*names: str) -> Targets:
    return folder("core", *names)


def pipeline(*names: str) -> Targets:
    return folder("pipeline", *names)


POOL = core("pool", "pool_policies", "pool_failures")
PUTS = core("stager_put", "put_into", "borrow", "staging")
GETS = core("stager_get", "staging")
LOAD = ("tests/test_load.py", "tests/test_load_damaged.py")
LAWS = ("tests/test_conformance_host.py",)
JAX = tuple(f"tests/jax/test_jax_{name}.py" for name in ("arrays", "cpu", "leases", "unpack", "sharded"))
JAX_ON_CUDA = ("_cuda", "_driver", "_events", "_fence", "_pinning", "_blocks")
SUITE = ("tests/test_suite_rules.py", "tests/test_gates.py", *LAWS, "tests/test_cli_conformance.py")

AREAS = {
    "memory": Area(
        ("xferlib/memory/*.py", "xferlib/pinning.py"),
        (
            *POOL,
            *core("limits", "ranges", "arrays", "pages", "pinning", "pinning_failures"),
            *core("full_ring", "stager_lifetime", "stager_put", "stager_get", "borrow", "staging"),
            *("tests/test_maps.py", *LAWS),
        ),
        {
            "/pinning.py": core("pinning", "pinning_failures"),
            "/limits.py": core("limits"),
            "/ranges.py": core("ranges", "pool"),
            "/pages.py": core("pages"),
            "/nodes.py": core("pages"),
            "/mappings.py": core("pages", "pinning"),
            "/arrays.py": core("arrays", "stager_put"),
            "/host.py": core("borrow", "stager_put", "pinning"),
            "/blocks.py": core("pinning", "pool_failures", "stager_lifetime"),
        },
    ),
    "transfers": Area(
        tuple(f"xferlib/{name}.py" for name in ("puts", "gets", "transfer", "stager", "checks", "views", "maps")),
        (
            *PUTS,
            *core("stager_get", "transfer", "bad_input", "stager_lifetime", "inflight", "packing", "device", "arrays"),
            *("tests/test_maps.py", "tests/test_loud.py", *core("full_ring", "pinning", "registry"), *LAWS),
        ),
        {
            "/puts.py": (*PUTS, *core("packing", "bad_input", "inflight")),
            "/gets.py": (*GETS, *core("bad_input")),
            "/transfer.py": core("transfer"),
            "/checks.py": core("bad_input", "put_into"),
            "/views.py": ("tests/test_maps.py",),
            "/maps.py": ("tests/test_maps.py",),
            "/stager.py": core("bad_input", "stager_put", "stager_get", "stager_lifetime"),
        },
    ),
    "device": Area(
        ("xferlib/device.py",),
        (*core("device", "device_failures", "packing", "stager_put", "stager_lifetime", "inflight", "put_into"), *LAWS),
    ),
    "load-tree-packing": Area(
        ("xferlib/load.py", "xferlib/tree.py", "xferlib/layout.py"),
        (
            *core("tree", "packing", "stager_put", "stager_get", "put_into"),
            "tests/test_load.py",
            "tests/test_load_damaged.py",
            *LAWS,
        ),
        {
            "/load.py": LOAD,
            "/layout.py": core("packing"),
        },
    ),
    "pipeline": Area(
        ("xferlib/pipeline/*.py",),
        (*pipeline("prefetch", "ring", "drain", "stream", "report"), "tests/pipeline", "tests/test_demo_pipeline.py"),
        {
            "/ring.py": pipeline("ring", "released_slots"),
            "/drain.py": pipeline("drain"),
            "/ends.py": pipeline("drain"),
            "/stream.py": pipeline("stream"),
            "/report.py": pipeline("report"),
            "/clock.py": pipeline("report"),
            "/bill.py": pipeline("ring"),
            "/rows.py": pipeline("ring"),
        },
    ),
    "workers": Area(
        ("xferlib/pipeline/shared/*.py",),
        tuple(
            f"tests/shared/test_{name}.py" for name in ("layout", "shared_memory", "shared_ring", "worker_deaths", "random_faults")
        ),
    ),
    "host": Area(
        ("backends/xferlib_host/*.py",),
        ("tests/host", *LAWS, *core("stager_put", "stager_get", "stager_lifetime", "transfer", "inflight"), "tests/test_maps.py"),
        {
            "_stream.py": ("tests/host/test_host_streams.py", "tests/host/test_host_events.py"),
            "_worker.py": ("tests/host/test_host_streams.py", "tests/host/test_host_failures.py"),
            "_memory.py": ("tests/host/test_host_memory.py", "tests/host/test_host_blocks.py"),
        },
        but=("*/conformance.py", "*/workload.py"),
    ),
    "jax-cpu": Area(
        ("backends/xferlib_jax/*.py",),
        (*JAX, "tests/jax/test_jax_random_run.py", "tests/frameworks", "backends/xferlib_jax/conformance.py"),
        {
            "_unpack.py": ("tests/jax/test_jax_unpack.py",),
            "_sharded.py": ("tests/jax/test_jax_sharded.py",),
            "_spread.py": ("tests/jax/test_jax_sharded.py",),
            "_prefetch.py": ("tests/jax/test_jax_sharded.py",),
            "_cpu.py": ("tests/jax/test_jax_cpu.py",),
            "_arrays.py": ("tests/jax/test_jax_arrays.py",),
        },
        # What only CUDA runs, and the suite's hooks.
        but=tuple(f"*/{name}.py" for name in (*JAX_ON_CUDA, "conformance", "workload", "diagnosis", "_probe")),
    ),
    "conformance": Area(
        ("xferlib/conformance/*.py", "xferlib/conformance/laws/*.py", "backends/xferlib_host/conformance.py"),
        (*SUITE, "tests/mutants/test_host_mutants.py"),
        {
            "/gates.py": ("tests/test_gates.py",),
            "/laws/*.py": (*LAWS, "tests/mutants/test_host_mutants.py"),
        },
        # What only runs on CUDA.
        but=("*/cuda.py", "*/cupti.py"),
    ),
}
