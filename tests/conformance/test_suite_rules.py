"""The suite's own rules: what a subclass may not do, what may be skipped, and what a run tells."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from xferlib_host.conformance import TestHost as Host

from xferlib.conformance import Hooks, StagerConformance
from xferlib.conformance.plugin import _capabilities
from xferlib.conformance.run_suite import run
from xferlib.conformance.verdicts import verdicts
from xferlib.protocol import LAWS, Capabilities

ROOT = Path(__file__).resolve().parents[2]
A_LAW = "test_law05_get_returns_while_its_producer_is_held"
A_CASE = "test_law06_a_transfer_completes_while_compute_is_held[small-put]"
HEADER = "from xferlib_host.conformance import TestHost as Host\nfrom xferlib.errors import BackendUnavailableError\n"


def outcome_of(folder: Path, source: str, *arguments: str, required: str = "") -> str:
    """Run a module of tests with pytest, and return what it printed."""
    module = folder / "test_outside.py"
    module.write_text(HEADER + source)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", "-rA", str(module), *arguments]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "XFERLIB_REQUIRE": required, "PATH": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment).stdout


def test_every_law_has_a_test() -> None:
    tests = [name for name in dir(StagerConformance) if name.startswith("test")]
    laws = [name for name in tests if name.startswith("test_law")]
    assert {int(name[8:10]) for name in laws} == set(LAWS)
    assert [name for name in tests if name not in laws and not name.startswith("test_hook_")] == []


def test_every_hook_has_a_test() -> None:
    tests = " ".join(name for name in dir(StagerConformance) if name.startswith("test_hook_"))
    hooks = set(vars(Hooks)) - {name for name in vars(Hooks) if name.startswith("_")}
    # Opening is what every test begins with; what is write-combined, law 11 asks of memory of either kind.
    unnamed = hooks - {"open", "known_failures", "from_numpy", "to_numpy", "write_combined"}
    assert {name for name in unnamed if name not in tests} == set()


def test_a_law_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match=f"Easy replaces {A_LAW}"):
        type("Easy", (Host,), {A_LAW: lambda self: None})


def test_a_law_cannot_be_removed() -> None:
    with pytest.raises(TypeError, match=f"Easy replaces {A_LAW}"):
        type("Easy", (Host,), {A_LAW: None})


def test_a_law_cannot_be_overridden_by_a_mixin() -> None:
    mixin = type("Mixin", (), {A_LAW: lambda self: None})
    with pytest.raises(TypeError, match=f"Easy replaces {A_LAW}"):
        type("Easy", (mixin, Host), {})


@pytest.mark.parametrize("name", ["stager", "assert_completes", "new_stager", "warm"])
def test_what_the_laws_are_written_with_cannot_be_overridden(name: str) -> None:
    with pytest.raises(TypeError, match=f"Easy replaces {name}"):
        type("Easy", (Host,), {name: lambda self: None})


@pytest.mark.parametrize("name", ["test_law15_no_such_law", "test_hook_of_no_use"])
def test_a_law_cannot_be_invented(name: str) -> None:
    with pytest.raises(TypeError, match=f"Hard defines {name}"):
        type("Hard", (Host,), {name: lambda self: None})


def test_a_subclass_may_have_tests_and_a_deadline_of_its_own() -> None:
    class Own(Host):
        deadline_seconds: ClassVar[float] = 30.0

        def test_something_of_its_own(self) -> None: ...

    assert Own.deadline_seconds == 30.0


@pytest.mark.parametrize("name", ["test_law06_no_such_test", f"{A_LAW}[small]", A_CASE.replace("put", "push"), "open"])
def test_a_known_failure_must_name_a_test(name: str) -> None:
    with pytest.raises(TypeError, match="known_failures names no test of the suite"):
        type("Excused", (Host,), {"known_failures": {name: "because"}})


def test_a_known_failure_must_have_a_reason() -> None:
    with pytest.raises(TypeError, match=f"gives no reason for {A_LAW}"):
        type("Excused", (Host,), {"known_failures": {A_LAW: " "}})


@pytest.mark.parametrize("mark", [pytest.mark.skip, [pytest.mark.xfail], pytest.mark.skipif(True, reason="no")])
def test_a_class_cannot_be_excused_by_a_mark(mark: Any) -> None:
    with pytest.raises(TypeError, match=r"only open\(\) may skip"):
        type("Excused", (Host,), {"pytestmark": mark})


def test_a_known_failure_that_fails_is_expected_and_says_why(tmp_path: Path) -> None:
    source = f"class TestIt(Host):\n    known_failures = {{{A_CASE!r}: 'so it is'}}\n"
    source += "    def held_array(self, *arguments): assert False\n"
    shown = outcome_of(tmp_path, source, "-k", "law06_a_transfer_completes_while_compute and (small-put or small-get_out)")
    assert f"{A_CASE} - so it is" in shown
    assert "2 failed" in shown
    assert "1 xfailed" in shown


@pytest.mark.parametrize(("name", "pick"), [(A_LAW, A_LAW), (A_CASE, "law06_a_transfer_completes_while_compute and small-put")])
def test_a_known_failure_that_passes_fails(tmp_path: Path, name: str, pick: str) -> None:
    source = f"class TestIt(Host):\n    known_failures = {{{name!r}: 'so it was'}}\n"
    shown = outcome_of(tmp_path, source, "-k", f"{pick} and not pageable")
    assert "[XPASS(strict)] so it was" in shown
    assert "1 failed" in shown


ABSENT = "class TestIt(Host):\n    def open(self): raise {error}('no such device')\n"


def test_a_backend_that_cannot_run_here_is_skipped(tmp_path: Path) -> None:
    shown = outcome_of(tmp_path, ABSENT.format(error="BackendUnavailableError"), "-k", A_LAW, required="other")
    assert "no such device" in shown
    assert "1 skipped" in shown


def test_a_backend_that_is_required_is_not_skipped(tmp_path: Path) -> None:
    shown = outcome_of(tmp_path, ABSENT.format(error="BackendUnavailableError"), "-k", A_LAW, required="other, host")
    assert "XFERLIB_REQUIRE=other, host forbids to skip this: no such device" in shown
    assert "1 error" in shown


def test_any_other_error_of_open_is_an_error(tmp_path: Path) -> None:
    shown = outcome_of(tmp_path, ABSENT.format(error="OSError"), "-k", A_LAW)
    assert "OSError: no such device" in shown
    assert "1 error" in shown


def test_hooks_that_belong_to_no_installed_backend_may_not_skip_where_any_is_required(tmp_path: Path) -> None:
    source = "from xferlib.conformance import StagerConformance\n"
    hooks = "from_numpy to_numpy hold_compute hold_copies held_array read_later break_copies memory_calls"
    source += ABSENT.format(error="BackendUnavailableError").replace("Host", "StagerConformance")
    source += "".join(f"    {name} = None\n" for name in hooks.split())
    assert "1 skipped" in outcome_of(tmp_path, source, "-k", A_LAW)
    assert "1 error" in outcome_of(tmp_path, source, "-k", A_LAW, required="host")


def test_a_failing_law_shows_its_operands(tmp_path: Path) -> None:
    source = "class TestIt(Host):\n    def to_numpy(self, array): return array.astype('int16')\n"
    shown = outcome_of(tmp_path, source, "-k", "law01_put_into")
    assert "assert dtype('int16') == dtype('int32')" in shown


def test_a_run_says_what_was_tested_on_what(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("host", ["-k", A_LAW]) == 0
    shown = capfd.readouterr().out
    flags = "capabilities: register, streams, put_into, mapped, finalizers; off: pinned, write_combined"
    for part in ("backend: host on the CPU (", flags, "xferlib 0."):
        assert part in shown
    assert "1 passed" in shown


def test_a_run_says_at_the_end_what_became_of_each_law(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("host", ["-q", "-k", f"{A_LAW} or law09 or hook_held"]) == 0
    lines = capfd.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.strip("=") == " laws ")
    shown = [" ".join(line.split()) for line in lines[at + 1 : -1]]
    assert shown[0] == "hooks passed 1 test The hooks do what they say"
    assert shown[1] == "law 5 passed 1 test Starting does not wait"
    assert shown[2].startswith("law 9 passed 10 tests Really pinned; pinned is off: ")
    assert shown[3].startswith("not run: laws 1, 2, 3, 4, 6, 7, 8, 10, ")
    assert len(shown) == 4


def test_a_run_of_no_law_says_nothing_of_laws(capfd: pytest.CaptureFixture[str]) -> None:
    run("host", ["-q", "-k", "nothing_of_that_name"])
    assert " laws " not in capfd.readouterr().out


def report(name: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(nodeid=f"somewhere.py::TestIt::{name}", **more)


def test_the_line_of_a_law_says_what_failed_what_was_skipped_and_why() -> None:
    skipped = ("somewhere.py", 1, "Skipped: no such device")
    stats: dict[str, list[Any]] = {
        "passed": [report("test_law01_one"), report("test_law01_two[int8]"), report("test_law12_one"), report("test_law06_one")],
        # The second time at its teardown.
        "error": [report("test_law01_two[int8]")],
        "failed": [report("test_law02_one")],
        "skipped": [report("test_law03_one", longrepr=skipped), report("test_law03_two", longrepr=skipped)],
        "xfailed": [report("test_law06_two", wasxfail="see there")],
        "": [report("test_law01_one")],
        "warnings": [SimpleNamespace()],
    }
    lines = [" ".join(line.split()) for line in verdicts(stats, ())]
    assert lines[0].startswith("law 1 FAILED 1 of 2 tests Content: ")
    assert lines[1] == f"law 2 FAILED 1 of 1 test {LAWS[2]}"
    assert lines[2] == "law 3 skipped 2 of 2 tests Nothing the caller drops can harm a copy; skipped: no such device"
    assert lines[3].startswith("law 6 fails 1 of 2 tests Real overlap: ")
    assert lines[3].endswith("; known failure: see there")
    assert lines[4] == "law 12 passed 1 test Failures surface"
    assert lines[5] == "not run: laws 4, 5, 7, 8, 9, 10, 11, 13, 14"
    assert len(lines) == 6


def test_a_run_returns_the_status_of_pytest(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("host", ["-k", "nothing_of_that_name"]) == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run("host", ["--no-such-option"]) == pytest.ExitCode.USAGE_ERROR


def test_a_run_says_none_where_all_capabilities_are_on_or_off() -> None:
    names = [field.name for field in fields(Capabilities)]
    backend: Any = SimpleNamespace(capabilities=Capabilities(**dict.fromkeys(names, False)))
    assert _capabilities(backend) == f"capabilities: none; off: {', '.join(names)}"
    backend.capabilities = Capabilities(**dict.fromkeys(names, True))
    assert _capabilities(backend) == f"capabilities: {', '.join(names)}; off: none"
