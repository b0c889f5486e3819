"""Which files make an area, and which tests judge it: those of the file that is broken first, then the area's."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from tests.mutants.sampled.tree import ROOT

__all__ = ["AREAS", "Area"]

Targets = tuple[str, ...]


@final
@dataclass(frozen=True)
class Area:
    """Patterns of files, without those that match `but`; `tests` judge them, or `own` by pattern, where a file has its own.

    Few and quick ones: whoever survives them is looked at by hand.
    """

    files: Targets
    tests: Targets
    own: dict[str, Targets] = field(default_factory=dict)
    but: Targets = ()
    hang_seconds: int = 60

    def paths(self) -> list[str]:
        """Return the files, in a fixed order."""
        found = {str(path.relative_to(ROOT)) for pattern in self.files for path in ROOT.glob(pattern)}
        return sorted(path for path in found if not any(fnmatch.fnmatch(path, pattern) for pattern in self.but))

    def targets(self, path: str, folder: Path = ROOT) -> list[str]:
        """Return what judges a file, in the order in which it is run. A target with a star stands for what there is in `folder`."""
        found = next((targets for pattern, targets in self.own.items() if fnmatch.fnmatch(path, f"*{pattern}")), self.tests)
        there = [
            sorted(str(file.relative_to(folder)) for file in folder.glob(target)) if "*" in target else [target] for target in found
        ]
        return list(dict.fromkeys(target for each in there for target in each))

    def everything(self) -> list[str]:
        """Return all that judges a file of this area."""
        return list(dict.fromkeys(target for path in self.paths() for target in self.targets(path)))


def folder(parent: str, *names: str) -> Targets:
    return tuple(f"tests/{parent}/test_{name}.py" for name in names)


def core(*names: str) -> Targets:
    return folder("core", *names)


def memory(*names: str) -> Targets:
    return folder("memory", *names)


def staging(*names: str) -> Targets:
    return folder("staging", *names)


def pipeline(*names: str) -> Targets:
    return folder("pipeline", *names)


POOL = memory("pinned_pool", "pinned_pool_policies", "pinned_pool_failures", "pinned_pool_limit*")
PUTS = (*core("stager_put", "put_into"), *staging("borrow", "pageable"))
GETS = (*core("stager_get"), *staging("small_gets", "pageable"))
LOAD = (
    *(f"tests/files/test_load{name}.py" for name in ("", "_ahead", "_damaged", "_dtype", "_hostile", "_many", "_progress")),
    "tests/files/test_pinned_files.py",
)
READING = tuple(
    f"xferlib/files/{name}.py" for name in ("ahead", "dtypes", "load", "locked_pages", "pinned_files", "readers", "shards")
)
LAWS = ("tests/conformance/test_host.py::TestHost",)
JOBS = folder("engine", "jobs")
JAX = tuple(
    f"tests/jax/test_jax_{name}.py"
    for name in ("arrays", "cpu", "engines", "imports", "layouts", "leases", "staged", "trees", "unpack", "sharded")
)
JAX_ON_CUDA = ("_cuda", "_driver", "_events", "_fence", "_pinning", "_blocks")
SUITE = (
    *("tests/conformance/test_suite_rules.py", "tests/conformance/test_suite_parts.py", "tests/test_gates.py"),
    *("tests/conformance/test_host.py", "tests/cli/test_conformance.py"),
)

AREAS = {
    "memory": Area(
        ("xferlib/memory/*.py", "xferlib/stats.py"),
        POOL,
        {
            "/pinned_pool.py": (
                *POOL,
                *memory("pinned_pool_results"),
                *staging("pageable_room"),
                *core("stager_put", "stager_lifetime"),
            ),
            "/locker.py": memory("pinned_pool_results"),
            "/mapped.py": ("tests/memory/test_mapped.py", *LAWS),
            "/registered.py": (
                *memory("registered", "registered_failures"),
                *core("stager_lifetime"),
                "tests/memory/test_mapped.py",
            ),
            "/limits.py": memory("limits", "pages"),
            "/ranges.py": (*memory("ranges", "pinned_pool_results"), *POOL),
            "/segments.py": (*memory("segments"), *POOL, *memory("pinned_pool_results"), *core("stager_lifetime")),
            "/pages.py": memory("pages", "registered", "pinned_pool_results"),
            "/numa.py": memory("pages"),
            "/proc_maps.py": memory("pages", "registered"),
            "/arrays.py": (*memory("arrays"), *core("stager_put", "bad_input"), *staging("pageable"), *LAWS),
            "/host.py": (*staging("borrow"), *core("stager_put"), *memory("registered"), *core("packing", "bad_input"), *LAWS),
            "/stats.py": memory("pinned_pool_policies", "pinned_pool_limit", "pages"),
            "/blocks.py": (*core("bad_input"), *POOL, *core("stager_lifetime")),
        },
        # Of other areas.
        but=("*/device_pool.py", "*/idle_blocks.py", "*/table.py"),
    ),
    "transfers": Area(
        tuple(
            f"xferlib/{name}.py" for name in ("h2d", "d2h", "transfer", "stager", "parts", "checks", "pageable_warning", "registry")
        ),
        # Of what written ones break elsewhere: what is in flight, and views of host memory.
        (*core("put_into", "across_stagers", "ledger"), "tests/memory/test_mapped.py", *LAWS),
        {
            "/h2d.py": (
                *PUTS,
                *memory("device_pool_readers"),
                *core("second_leaf", "across_stagers", "packing", "bad_input", "in_flight", "ledger"),
                *memory("device_pool"),
                "tests/core/test_pageable_warning.py",
                *LAWS,
                *pipeline("ring_reuse"),
            ),
            "/d2h.py": (
                *GETS,
                *JOBS,
                *memory("pinned_pool_results"),
                *core("second_leaf", "bad_input", "in_flight", "ledger"),
                *LAWS,
                *pipeline("ring_reuse"),
            ),
            "/transfer.py": (*core("transfer"), *staging("borrow"), *core("stager_get"), *LAWS),
            "/checks.py": (
                *core("bad_input", "put_into", "stager_put", "stager_get", "tracebacks"),
                "tests/memory/test_mapped.py",
                # Alone: what else is there goes through every allocation.
                "tests/core/test_foreign_finalizers.py::test_finalizers_are_refused_where_the_framework_does_not_survive_them",
            ),
            "/pageable_warning.py": (*core("pageable_warning"), *memory("pinned_pool_results")),
            "/registry.py": core("registry"),
            "/resources.py": core("stager_lifetime", "registry", "reaper"),
            "/stager.py": (
                *core("bad_input", "stager_put", "stager_get", "stager_lifetime"),
                *memory("pinned_pool_policies"),
                *staging("pageable"),
                *memory("registered"),
                *core("registry"),
                *("tests/core/test_pageable_warning.py", "tests/memory/test_mapped.py", *LAWS),
            ),
        },
    ),
    "engine": Area(
        (
            *(f"xferlib/engine/{name}.py" for name in ("jobs", "lanes", "dispatcher", "cores")),
            *(f"xferlib/staging/{name}.py" for name in ("pageable", "bounce", "coalesce", "small_gets")),
            "xferlib/memory/foreign.py",
        ),
        (*JOBS, *staging("pageable*"), *core("across_stagers", "stager_lifetime", "injected_interrupts"), *LAWS),
        {
            "/cores.py": folder("engine", "cores"),
            "/lanes.py": (
                *folder("engine", "threads"),
                *JOBS,
                *staging("pageable*"),
                *core("across_stagers", "stager_lifetime"),
                *LAWS,
            ),
            "/dispatcher.py": (*JOBS, *core("foreign_finalizers", "stager_lifetime"), *LAWS),
            "/bounce.py": (
                *staging("bounce"),
                *core("put_into"),
                *staging("pageable"),
                *memory("pinned_pool_limit"),
                *core("stager_put", "packing"),
                *staging("pageable_room"),
                *JOBS,
                *LAWS,
            ),
            "/pageable.py": (
                *JOBS,
                *staging("pageable*", "small_gets", "bounce"),
                *core("packing", "put_into", "across_stagers", "foreign_finalizers"),
                *LAWS,
            ),
            "/foreign.py": (*staging("bounce"), "tests/test_debug.py"),
            "/coalesce.py": (*staging("bounce", "pageable*"), *core("put_into"), *LAWS),
            "/small_gets.py": (*staging("small_gets", "pageable"), *core("foreign_finalizers"), *LAWS),
        },
        # Some wait for what a broken engine never does, and some start processes.
        hang_seconds=120,
    ),
    "device": Area(
        (
            *(f"xferlib/memory/{name}.py" for name in ("device_pool", "idle_blocks", "table")),
            "xferlib/tickets.py",
            "xferlib/reaper.py",
            "xferlib/uninterrupted.py",
        ),
        (
            *memory("table", "device_pool", "device_pool_failures"),
            *core("injected_interrupts"),
            *memory("device_pool_readers"),
            *core("packing", "stager_put", "stager_lifetime", "put_into"),
            *LAWS,
        ),
        {
            "/table.py": (
                *memory("table", "device_pool", "device_pool_failures"),
                *core("foreign_finalizers", "injected_interrupts", "stager_lifetime"),
                *POOL,
            ),
            "/tickets.py": (*core("ticket*"), *memory("device_pool", "device_pool_failures"), *core("stager_lifetime")),
            **dict.fromkeys(
                ("/reaper.py", "/uninterrupted.py"),
                (
                    *core("reaper", "uninterrupted", "foreign_finalizers"),
                    *memory("device_pool", "device_pool_failures"),
                    *core("stager_lifetime"),
                ),
            ),
        },
    ),
    "ownership": Area(
        tuple(f"xferlib/{name}.py" for name in ("in_flight", "ledger", "pending", "handles", "latch", "forks", "callers", "debug")),
        (),
        {
            "/in_flight.py": (
                *core("in_flight", "ledger"),
                *core("across_stagers", "put_into"),
                *core("reaper", "foreign_finalizers", "stager_lifetime"),
            ),
            **dict.fromkeys(
                ("/ledger.py", "/pending.py"),
                (
                    *core("ledger"),
                    *staging("pageable_room"),
                    *core("across_stagers", "put_into"),
                    *memory("device_pool_readers"),
                    *core("reaper", "foreign_finalizers", "stager_lifetime"),
                ),
            ),
            "/handles.py": core("handles"),
            "/latch.py": (
                *core("latch", "in_flight", "ledger", "transfer", "reaper", "stager_lifetime"),
                *pipeline("background", "prefetch", "stream", "one_pass*"),
                "tests/host",
            ),
            "/forks.py": (*core("stager_lifetime", "reaper", "transfer"), "tests/memory/test_mapped.py"),
            "/callers.py": core("stager_lifetime"),
            "/debug.py": ("tests/test_debug.py",),
        },
    ),
    "load-tree-packing": Area(
        (*READING, "xferlib/tree.py", "xferlib/packing.py"),
        (
            *core("tree", "described", "packing", "stager_put", "stager_get", "put_into"),
            *LOAD,
            *LAWS,
        ),
        {
            **dict.fromkeys(("/ahead.py", "/dtypes.py", "/load.py", "/readers.py", "/shards.py"), LOAD),
            "/packing.py": core("packing"),
        },
    ),
    "files": Area(
        (
            *(
                f"xferlib/files/{name}.py"
                for name in (
                    *("save", "outcome", "plan", "pace", "writing", "series", "temporary", "formats", "names"),
                    *("regions", "sharded"),
                )
            ),
            "xferlib/byte_reader.py",
        ),
        (
            "tests/core/test_byte_reader.py",
            *(f"tests/files/test_save{part}.py" for part in ("", "_sharded", "_meanwhile", "_failures", "_cut_off")),
            "tests/files/test_load.py",
        ),
        {
            "/regions.py": ("tests/files/test_regions.py", "tests/files/test_save_sharded.py"),
            "/sharded.py": ("tests/files/test_save_sharded.py",),
        },
    ),
    "tracing": Area(
        ("xferlib/tracing/*.py",),
        ("tests/tracing/test_trace.py", "tests/tracing/test_gpu.py", "tests/tracing/test_page.py"),
        {
            "/intervals.py": ("tests/tracing/test_intervals.py",),
            **dict.fromkeys(("/gaps.py", "/summary.py"), ("tests/tracing/test_summary.py",)),
            "/records.py": ("tests/tracing/test_records.py", "tests/tracing/test_gpu.py"),
            "/gpu.py": ("tests/tracing/test_gpu.py",),
            "/page.py": ("tests/tracing/test_page.py",),
            "/rows.py": ("tests/tracing/test_page.py",),
            "/__main__.py": ("tests/cli/test_trace_command.py",),
        },
    ),
    "pipeline": Area(
        ("xferlib/pipeline/*.py",),
        ("tests/pipeline",),
        {
            "/ring.py": pipeline("ring", "ring_*", "released_slots", "prefetch", "closing_meanwhile", "sources_and_bills"),
            **dict.fromkeys(
                ("/background.py", "/source_thread.py"),
                pipeline(
                    "background",
                    "prefetch",
                    "stream_map",
                    "one_pass*",
                    "prefetch_refusals",
                    "closing_meanwhile",
                    "sources_and_bills",
                ),
            ),
            "/prefetch.py": (
                *pipeline("prefetch", "one_pass*", "prefetch_refusals", "released_slots", "report", "stream_map", "unshared"),
                *pipeline("sources_and_bills"),
            ),
            "/host_tree.py": pipeline("host_tree"),
            **dict.fromkeys(
                ("/drain.py", "/drained.py"),
                pipeline("drain*", "one_pass*", "stream_map", "closing_meanwhile", "report", "sources_and_bills"),
            ),
            **dict.fromkeys(
                ("/completion.py", "/memory_users.py"),
                pipeline("drain", "ring", "ring_reuse", "released_slots", "stream_map", "sources_and_bills"),
            ),
            "/stream_map.py": pipeline("stream_map", "one_pass*", "report", "sources_and_bills"),
            "/report.py": pipeline("report", "stream_map", "sources_and_bills"),
            "/unshared.py": pipeline("unshared"),
            "/phase_timer.py": pipeline("report", "prefetch", "sources_and_bills"),
            "/memory_estimate.py": pipeline("ring", "prefetch", "drain", "sources_and_bills"),
            "/output_writer.py": pipeline("drain", "stream_map", "sources_and_bills"),
        },
    ),
    "workers": Area(
        ("xferlib/pipeline/workers/*.py",),
        (*folder("workers", "layout", "shared_memory", "shared_ring", "worker_deaths"), "tests/workers/test_*.py"),
    ),
    "host": Area(
        ("backends/xferlib_host/*.py",),
        ("tests/host", *LAWS),
        {
            "_memory.py": ("tests/host/test_host_memory.py", "tests/host/test_host_blocks.py", "tests/host", *LAWS),
            "_stager.py": ("tests/host", *LAWS, "tests/memory/test_mapped.py"),
        },
        but=("*/conformance.py", "*/workload.py"),
    ),
    "cuda": Area(
        ("xferlib/cuda/*.py",),
        ("tests/cuda", "tests/jax/test_jax_driver.py", "tests/numba/test_by_engine.py"),
    ),
    "jax-cpu": Area(
        ("backends/xferlib_jax/*.py",),
        (*JAX, "tests/jax/test_jax_random_run.py", "tests/frameworks", "tests/mutants/laws", "backends/xferlib_jax/conformance.py"),
        {
            "_unpack.py": ("tests/jax/test_jax_unpack.py",),
            **{f"_{name}.py": ("tests/jax/test_jax_sharded.py",) for name in ("spread", "prefetch", "stagers", "gather")},
            "_sharded.py": ("tests/jax/test_jax_sharded.py", "tests/jax/test_jax_files.py"),
            "_load.py": ("tests/jax/test_jax_files.py",),
            "_save.py": ("tests/jax/test_jax_files.py", "tests/jax/test_jax_finalizers.py"),
        },
        # What only CUDA runs, and the suite's hooks.
        but=tuple(f"*/{name}.py" for name in (*JAX_ON_CUDA, "conformance", "workload", "diagnosis", "_probe")),
        # Some start processes that compile.
        hang_seconds=180,
    ),
    "conformance": Area(
        (
            "xferlib/conformance/*.py",
            "xferlib/conformance/laws/*.py",
            "xferlib/gates.py",
            "xferlib/watchdog.py",
            "backends/xferlib_host/conformance.py",
        ),
        (*SUITE, "tests/mutants/laws/test_host_mutants.py"),
        {
            "/gates.py": ("tests/test_gates.py",),
            "/guard*.py": ("tests/conformance/test_guard.py",),
            "/watchdog.py": ("tests/test_gates.py",),
            "/laws/*.py": (*LAWS, "tests/mutants/laws/test_host_mutants.py"),
        },
        # What only runs on CUDA.
        but=("*/cuda.py", "*/cupti.py"),
        # One test waits for a process that runs many mutants.
        hang_seconds=150,
    ),
}
