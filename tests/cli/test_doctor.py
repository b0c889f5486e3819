"""What doctor tells, to people and to machines."""

from __future__ import annotations

import dataclasses
import glob
import json
import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from typing import Any, cast

import pytest
import xferlib_cupy.diagnosis

import xferlib
from xferlib.cli import doctor, machine, main
from xferlib.overlap.measure import measure_overlap
from xferlib.overlap.overlap_report import OverlapReport, Spread


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    assert end.value.code == status
    return capsys.readouterr().out


def test_json_has_this_shape(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(told(capsys, "--json"))
    assert set(report) == {"versions", "platform", "cores", "memory", "auto", "backends", "findings"}
    assert {"python", "xferlib", "numpy", "optree"} <= set(report["versions"])
    assert set(report["memory"]) == {"total_nbytes", "available_nbytes", "limit_nbytes", "pinned_limit_nbytes", "memlock_nbytes"}
    assert 0 < report["memory"]["pinned_limit_nbytes"] < report["memory"]["limit_nbytes"] <= report["memory"]["total_nbytes"]
    assert report["auto"] in xferlib.backends()
    assert tuple(state["name"] for state in report["backends"]) == xferlib.backends()
    for state in report["backends"]:
        opened = {"device", "on_gpu", "capabilities", "link", "pin", "wall_nbytes", "paths", "staging"}
        assert set(state) == {"name", "ready", "reason", "versions", "findings"} | opened
        assert state["ready"] is (state["reason"] is None)


def test_host_is_ready_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(told(capsys, "--json", "--require", "host"))
    (state,) = (state for state in report["backends"] if state["name"] == "host")
    assert state["ready"] is True
    assert state["capabilities"] == {
        "pinned": False,
        "register": True,
        "streams": True,
        "put_into": True,
        "mapped": True,
        "write_combined": False,
        "finalizers": True,
    }
    assert "capabilities:" in told(capsys)


def test_a_required_backend_that_is_not_installed_sets_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--require", "host", "--require", "abacus"])
    assert end.value.code == 1
    assert "required backend 'abacus' is not installed. Installed: " in capsys.readouterr().err


def test_a_required_backend_that_is_not_ready_sets_the_status_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, xferlib.BackendUnavailableError("backend 'host' cannot run here: no luck. Try again"))
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--require", "host"])
    assert end.value.code == 1
    assert "required backend 'host' is not ready: backend 'host' cannot run here: no luck. Try again" in capsys.readouterr().err


def test_a_broken_backend_is_a_finding_not_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(monkeypatch, ImportError("libabacus.so: cannot open"))
    report = json.loads(told(capsys, "--json"))
    assert report["auto"] is None
    assert {state["reason"] for state in report["backends"]} == {"it is broken: ImportError: libabacus.so: cannot open"}


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def opening(name: str, **_: object) -> Any:
        raise error

    monkeypatch.setattr(doctor, "stager", opening)


@pytest.mark.parametrize(("name", "text"), [("XFERLIB_STAGING", "nonsense"), ("XFERLIB_DEBUG", "yes")])
def test_a_setting_of_ours_that_cannot_be_read_is_a_finding_and_no_backends_fault(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    report = json.loads(told(capsys, "--json", "--require", "host"))
    finding = next(finding for finding in report["findings"] if name in finding)
    assert finding.startswith(f"{name}: expected")
    assert f"got {text!r}. " in finding
    (state,) = (state for state in report["backends"] if state["name"] == "host")
    assert (state["ready"], state["reason"], state["staging"]) == (True, None, None)
    assert report["auto"] == "host"
    page = told(capsys)
    assert name in page
    assert "unknown, threads x chunk" in page


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_INJECTION64_PATH"])
def test_settings_that_break_overlap_are_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    finding = next(finding for finding in json.loads(told(capsys, "--json"))["findings"] if name in finding)
    assert finding.startswith(f"{name}=1 is set: ")
    assert name in told(capsys)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_LAUNCH_BLOCKING", ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ],
)
def test_settings_that_break_nothing_are_not(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert not any(name in finding for finding in json.loads(told(capsys, "--json"))["findings"])


def test_a_setting_that_hides_the_devices_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert any("hides every GPU" in finding for finding in json.loads(told(capsys, "--json"))["findings"])


@pytest.mark.parametrize(
    ("devices", "on_gpu", "words"),
    [
        ([], False, "no NVIDIA GPU is to be seen"),
        (["/dev/nvidia0"], False, "no backend is ready on it"),
        (["/dev/nvidia0"], True, ""),
    ],
)
def test_without_a_gpu_it_says_what_that_means(
    devices: list[str], on_gpu: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glob, "glob", lambda pattern: devices)
    found = machine.no_gpu([{"name": "one", "ready": False, "on_gpu": None}, {"name": "two", "ready": True, "on_gpu": on_gpu}])
    assert words in "".join(found)
    if words:
        assert "not looked at, for want of a GPU: the link, what page-locking costs, and which copies of one are" in found[-1]
    else:
        assert found == []


def test_little_pinned_memory_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.little_memory() == []
    monkeypatch.setattr(machine, "default_pinned_limit", lambda: 16 << 20)
    (finding,) = machine.little_memory()
    assert finding.startswith("at most 16.0 MiB is pinned by default")


def test_linux_inside_windows_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.wsl([]) == []
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    (finding,) = machine.wsl([{"wall_nbytes": None}])
    assert "pinned_limit=" in finding
    assert machine.wsl([{"wall_nbytes": 512 << 20}]) == []


class Walled:
    """A stager on a GPU whose driver page-locks no more than `wall` bytes. `sticky`: the error is raised once more, later."""

    name, on_gpu = "walled", True

    def __init__(self, inner: xferlib.Stager, wall: int, *, sticky: bool) -> None:
        self._inner, self._left, self._sticky, self._pending = inner, wall, sticky, False
        self.capabilities = dataclasses.replace(inner.capabilities, pinned=True)
        self.trimmed = 0

    def stats(self) -> Any:
        return dataclasses.replace(self._inner.stats(), pinned_limit_nbytes=1 << 40)

    def empty_pinned(self, nbytes: int, dtype: Any) -> Any:
        if nbytes < doctor.WALL_STEP:
            return self._inner.empty_pinned(nbytes, dtype)
        self._left -= nbytes
        if self._left < 0:
            self._pending = self._sticky
            raise xferlib.AllocationError("the driver refused to page-lock memory")
        return object()

    def trim(self) -> None:
        self.trimmed += 1

    def put(self, source: Any) -> Any:
        if self._pending:
            raise RuntimeError("out of memory")
        return self._inner.put(source)

    def get(self, array: Any) -> Any:
        return self._inner.get(array)


@pytest.mark.parametrize("sticky", [False, True])
def test_a_wall_of_pinned_memory_is_found_and_what_it_leaves_behind_is_told(sticky: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with xferlib.stager("host") as inner:
        walled = Walled(inner, 700 << 20, sticky=sticky)
        # Elsewhere nobody looks for one.
        assert doctor._wall(cast("xferlib.Stager", walled)) == (None, [])
        monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
        wall, findings = doctor._wall(cast("xferlib.Stager", walled))
        assert wall == 640 << 20
        assert walled.trimmed == 1
        assert "page-locked 640.0 MiB here and refused more. Pass pinned_limit=640 << 20 or less" in findings[0]
        assert len(findings) == 1 + sticky
        assert not sticky or "the refusal left an error behind, so that the next copy failed (RuntimeError: out of" in findings[1]
        # Without a wall there is nothing to say.
        assert doctor._wall(cast("xferlib.Stager", Walled(inner, 1 << 40, sticky=False))) == (None, [])


def test_what_the_frameworks_own_copies_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: on a CPU nothing is said of them."""
    monkeypatch.setattr(doctor, "PATHS_NBYTES", 1 << 20)
    with xferlib.stager("host") as opened:
        end = time.monotonic() + 3600
        assert doctor._paths(opened, end) == (None, [])
        monkeypatch.setattr(type(opened), "on_gpu", property(lambda self: True))
        paths, _ = doctor._paths(opened, end)
        assert paths is not None
        assert {path["direction"] for path in paths} == {"h2d", "d2h"}
        assert all(path["gbps"] > 0 and path["call"] in path["words"] for path in paths)
        json.dumps(paths)

        def disturbed(stager: xferlib.Stager, *, nbytes: int, rounds: int) -> OverlapReport:
            """In one of the rounds something else used the device."""
            report = measure_overlap(stager, nbytes=nbytes, rounds=1)
            shares = Spread.of([0.97] * (rounds - 1) + [-3.0])
            return dataclasses.replace(
                report,
                on_gpu=True,
                rows=tuple(
                    dataclasses.replace(row, on_gpu=True, compute_seconds=row.copy_seconds, copy_first=shares, compute_first=shares)
                    for row in report.rows
                ),
            )

        monkeypatch.setattr(doctor, "measure_overlap", disturbed)
        paths, findings = doctor._paths(opened, end)
        assert paths is not None
        assert {path["waits_for_compute"] for path in paths} == {False}
        assert not [finding for finding in findings if finding.startswith("xferlib")]

        def broken(stager: xferlib.Stager, **options: int) -> None:
            raise AttributeError("no row_stack")

        monkeypatch.setattr(doctor, "measure_overlap", broken)
        assert doctor._paths(opened, end) == (None, ["copies of host could not be looked at: AttributeError: no row_stack"])


def test_what_would_take_too_long_is_not_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with xferlib.stager("host") as inner:
        walled = cast("xferlib.Stager", Walled(inner, 1 << 40, sticky=False))
        paths, (finding,) = doctor._paths(walled, time.monotonic() - 1)
        assert paths is None
        assert "were not looked at, since this page takes at most 20 s: xferlib overlap walled does" in finding


def test_the_limit_on_locked_memory_is_named_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert "(ulimit -l, 8.0 MiB, does not bear on it)" in " ".join(told(capsys).split())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert json.loads(told(capsys, "--json"))["memory"]["memlock_nbytes"] is None
    assert "ulimit" not in told(capsys)


def test_a_jax_whose_memory_grows_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import diagnosis

    monkeypatch.setattr(diagnosis, "versions", lambda: {"jax": "0.11.2", "jax-cuda13-plugin": "0.11.2"})
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert any("XLA_PYTHON_CLIENT_PREALLOCATE=false lets" in finding for finding in diagnosis.findings())
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert diagnosis.findings() == []


@pytest.mark.parametrize("name", ["JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_DISABLE_JIT"])
def test_settings_by_which_jax_waits_are_told_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import diagnosis

    monkeypatch.setattr(diagnosis, "versions", lambda: {"jax": "0.11.2"})
    monkeypatch.setenv(name, "True")
    (finding,) = diagnosis.findings()
    assert finding.startswith(f"{name}=True has JAX ")
    assert finding.endswith("nothing overlaps with that. Unset it")
    monkeypatch.setenv(name, "0")
    assert diagnosis.findings() == []


@pytest.mark.parametrize(("version", "is_bad"), [("0.10.2", True), ("0.11.1", True), ("0.11.2", False), ("0.12.0.dev1", False)])
def test_a_jax_that_is_known_to_be_bad_on_a_gpu_is_told_of(version: str, is_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from xferlib_jax import diagnosis

    monkeypatch.setattr(diagnosis, "versions", lambda: {"jax": version, "jax-cuda13-plugin": version})
    assert [f"JAX {version} may free device memory" in finding for finding in diagnosis.findings()] == [True] * is_bad
    monkeypatch.setattr(diagnosis, "versions", lambda: {"jax": version})
    assert diagnosis.findings() == []


def test_the_page_for_people_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    page = told(capsys)
    assert all(name in page for name in xferlib.backends())


def test_findings_of_a_backend_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert xferlib_cupy.diagnosis.versions() == installed
    report = json.loads(told(capsys, "--json"))
    (state,) = (state for state in report["backends"] if state["name"] == "cupy")
    assert state["versions"] == installed
    assert "pip uninstall cupy-cuda12x cupy-cuda13x; then install one" in state["findings"][0]


def test_the_version_is_told_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"xferlib {metadata.version('xferlib')}\n"


def test_without_a_command_the_page_and_the_commands_are_shown() -> None:
    shown = subprocess.run([sys.executable, "-m", "xferlib"], capture_output=True, text=True, check=True)
    assert "host" in shown.stdout
    assert all(f"xferlib {command}" in shown.stdout for command in ("demo", "doctor", "conformance", "overlap", "trace"))
    assert shown.stderr == ""
