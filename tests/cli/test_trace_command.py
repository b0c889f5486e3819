"""`xferlib trace`: which command lines it takes, and what a program leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import children
from xferlib.cli.command_error import UsageError
from xferlib.cli.trace_program import command_line

PROGRAM = """
import sys
import numpy as np
import xferlib

with xferlib.stager("host") as stager:
    stager.put(stager.empty_pinned(1 << 20, np.uint8)).result()
print(sys.argv[1:], __name__, sys.path[0])
raise SystemExit(5)
"""
FILES = (Path("a.json"), Path("a.html"))


def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    done = children.run([sys.executable, "-m", "xferlib", "trace", *words], seconds=60, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_a_program_runs_as_ever_and_leaves_both_files(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "train.py").write_text(PROGRAM)
    status, stdout, stderr = run("--", sys.executable, "part/train.py", "--lr", "3", cwd=tmp_path)
    assert status == 5, stderr
    assert stdout.splitlines() == [f"['--lr', '3'] __main__ {tmp_path / 'part'}"]
    (copy,) = [entry for entry in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if entry.get("cat") == "h2d"]
    assert copy["args"]["site"] == "part/train.py:7"
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert "1 copy to the device, 1.0 MiB" in stderr
    assert stderr.endswith("written: run.json and run.html\n")


def test_threads_that_go_on_behind_the_end_of_the_program_are_named(tmp_path: Path) -> None:
    """What they do is not in the trace, which would say that nothing was done."""
    program = """
import threading

import numpy as np
import xferlib

def work():
    # As long as the trace runs.
    while xferlib.Trace.running():
        pass
    with xferlib.stager("host") as stager:
        stager.put(stager.empty_pinned(1 << 20, np.uint8)).result()
    print("worked")

threading.Thread(target=work, name="loop").start()
"""
    (tmp_path / "train.py").write_text(program)
    status, stdout, stderr = run("--", sys.executable, "train.py", cwd=tmp_path)
    assert (status, stdout) == (0, "worked\n")
    assert "no copy and no kernel was recorded" in stderr
    assert "threads of the program still run (loop), and what they do from now on is not traced. Join them\n" in stderr


def test_files_that_are_replaced_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "x.html").write_text("an earlier one")
    words = ("--html", "x.html", "--", sys.executable, "train.py")
    assert run(*words, cwd=tmp_path)[2].endswith("written: run.json and x.html (in place of an earlier one)\n")
    both = "written: run.json (in place of an earlier one) and x.html (in place of an earlier one)\n"
    assert run(*words, cwd=tmp_path)[2].endswith(both)
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")


def test_a_module_runs_and_one_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text("raise ValueError('in the program')\n")
    status, _, stderr = run("--json", "x.json", "--html", "x.html", "--", sys.executable, "-m", "training", cwd=tmp_path)
    assert status == 1
    assert "ValueError: in the program" in stderr
    assert (tmp_path / "x.json").exists()
    assert (tmp_path / "x.html").exists()


def test_the_path_stays_as_it_is_where_the_folder_of_the_program_is_not_to_be_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    plain = children.run([sys.executable, "-P", "train.py"], seconds=60, cwd=tmp_path).stdout
    status, stdout, stderr = run("--", sys.executable, "-P", "train.py", cwd=tmp_path)
    assert (status, stdout) == (0, plain), stderr


def test_options_of_the_interpreter_stay_in_front() -> None:
    line = command_line([sys.executable, "-u", "-W", "error", "-Xdev", "train.py", "-m", "x"], *FILES)
    assert line[1:] == ["-u", "-W", "error", "-Xdev", "-m", "xferlib.tracing", "a.json", "a.html", "train.py", "-m", "x"]


@pytest.mark.parametrize(
    ("words", "flags"), [(["-mpytest"], []), (["-um", "pytest"], ["-u"]), (["-BIXdev", "-Ompytest"], ["-BIXdev", "-O"])]
)
def test_a_module_may_stand_beside_other_options(words: list[str], flags: list[str]) -> None:
    line = command_line([sys.executable, *words, "tests"], *FILES)
    assert line[1:] == [*flags, "-m", "xferlib.tracing", "a.json", "a.html", "-m", "pytest", "tests"]


@pytest.mark.parametrize("name", ["python", "python3"])
def test_a_bare_name_is_this_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is found first, where no environment is active, has no xferlib."""
    monkeypatch.setenv("PATH", "")
    assert command_line([name, "train.py"], *FILES)[0] == sys.executable


def test_a_file_is_run_by_this_interpreter() -> None:
    assert command_line(["train.py", "1"], *FILES) == [
        sys.executable,
        *("-m", "xferlib.tracing", "a.json", "a.html", "train.py", "1"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "only Python programs"),
        (["torchrun", "train.py"], "only Python programs can be traced"),
        ([sys.executable], "no program is named"),
        ([sys.executable, "-u"], "no program is named"),
        ([sys.executable, "-m"], "no program is named"),
        ([sys.executable, "-c", "pass"], "cannot be traced. Put it into a file"),
        ([sys.executable, "-ucpass"], "cannot be traced. Put it into a file"),
        (["/nowhere/python3", "train.py"], "there is no '/nowhere/python3'"),
    ],
)
def test_what_is_no_program_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command_line(words, *FILES)


def test_a_program_that_is_not_there_is_refused_and_an_earlier_trace_stays(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("an earlier one")
    status, stdout, stderr = run("--", sys.executable, "trian.py", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert stderr == "xferlib: there is no file 'trian.py'\n"
    assert (tmp_path / "run.json").read_text() == "an earlier one"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "nomod"], "No module named nomod"),
        (["-m", "package.nomod"], "No module named package.nomod"),
        (["-m", "package.wrong"], "SyntaxError"),
        (["wrong.py"], "SyntaxError"),
        (["-X", "frozen_modules=off", "wrong.py"], "SyntaxError"),
    ],
)
def test_a_program_that_cannot_be_begun_leaves_an_earlier_trace(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "wrong.py").write_text("def (\n")
    for name in ("run.json", "run.html"):
        (tmp_path / name).write_text("an earlier one")
    status, _, stderr = run("--", sys.executable, *words, cwd=tmp_path)
    assert status == 1
    assert said in stderr
    assert "xferlib: the program could not be begun: run.json and run.html were not written\n" in stderr
    assert [(tmp_path / name).read_text() for name in ("run.json", "run.html")] == ["an earlier one"] * 2


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"], ["-m", "package.train"]])
def test_a_program_whose_imports_fail_was_begun(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "wrong.py").write_text("def (\n")
    for file in ("train.py", "package/__init__.py"):
        (tmp_path / file).write_text("import wrong\n")
    status, _, stderr = run("--", sys.executable, *words, cwd=tmp_path)
    assert status == 1
    assert "SyntaxError" in stderr
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == []
    assert (tmp_path / "run.html").exists()


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
def test_a_program_that_has_ended_was_begun_whatever_is_raised_behind_it(tmp_path: Path, words: list[str]) -> None:
    """What runs a file puts back the first of its arguments."""
    program = """
import sys

import numpy as np
import xferlib

with xferlib.stager("host") as stager:
    stager.put(np.ones(5)).synchronize()
sys.argv.clear()
"""
    (tmp_path / "train.py").write_text(program)
    status, _, stderr = run("--", sys.executable, *words, cwd=tmp_path)
    assert status == 1
    assert "IndexError" in stderr
    assert "1 copy to the device" in stderr
    assert stderr.count("written: run.json and run.html\n") == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    status, stdout, stderr = run("--html", "missing/run.html", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert "the folder of 'missing/run.html' is not there" in stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "run.html"), "'run.html' cannot be both files, the events and the page. Give one of them another name"),
        (("--json", "a.json", "--html", "link.html"), "'link.html' cannot be both files"),
        (("--html", "there/.."), "'there/..' is a folder. Name a file in it"),
    ],
)
def test_what_cannot_be_both_files_is_refused_before_the_program_runs(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "link.html").symlink_to("a.json")
    (tmp_path / "there").mkdir()
    status, stdout, stderr = run(*words, "--", sys.executable, "train.py", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert message in stderr


def test_what_is_no_file_holds_nothing_earlier(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    status, _, stderr = run("--json", "/dev/null", "--html", "/dev/null", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (status, stderr.splitlines()[-1]) == (0, "written: /dev/null and /dev/null")


def test_a_name_that_no_file_can_have_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    name = "x" * 300
    status, stdout, stderr = run("--json", name, "--", sys.executable, "train.py", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert f"{name!r} can be no file: File name too long. Choose another one" in stderr


def test_a_file_of_which_nobody_can_tell_whether_it_is_there_leaves_the_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    name = "x" * 300
    command = [sys.executable, "-m", "xferlib.tracing", name, "run.html", "train.py"]
    ended = children.run(command, seconds=60, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "ran\n")
    assert f"xferlib: {name} was not written: " in ended.stderr
    assert (tmp_path / "run.html").exists()


TERMINATED = """
import os, signal, sys, time

if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
else:
    # Children are ended as ever, even before they are children to Python.
    for _ in range(20):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize(("words", "status"), [([], 143), (["own"], 7)])
def test_a_program_that_is_terminated_leaves_both_files(tmp_path: Path, words: list[str], status: int) -> None:
    (tmp_path / "train.py").write_text(TERMINATED)
    found, _, stderr = run("--", sys.executable, "-W", "ignore", "train.py", *words, cwd=tmp_path)
    assert found == status, stderr
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == []
    assert (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("", 1, ""), ("raise ValueError('in the program')", 1, "ValueError: in the"), ("raise SystemExit(5)", 5, "")],
)
def test_what_cannot_be_written_is_said_and_the_program_ends_as_it_ends(tmp_path: Path, end: str, status: int, said: str) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text(f"import os\nos.rmdir('gone')\n{end}\n")
    found, _, stderr = run("--json", "gone/run.json", "--", sys.executable, "train.py", cwd=tmp_path)
    assert found == status
    assert "xferlib: gone/run.json was not written: [Errno 2]" in stderr
    assert said in stderr
    assert (tmp_path / "run.html").exists()


@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()"])
def test_a_program_whose_streams_are_gone_leaves_both_files(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(f"import sys\n{end}\n")
    _, _, stderr = run("--", sys.executable, "train.py", cwd=tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == [], stderr
    assert (tmp_path / "run.html").exists()
