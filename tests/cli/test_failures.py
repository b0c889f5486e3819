"""What every command says, and its status, where it cannot go on for a reason that is not its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import xferlib.cli.doctor
from xferlib.cli import main

COMMANDS = (["overlap", "host"], ["demo", "--backend", "host"], ["conformance", "host"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("XFERLIB_STAGING", "garbage", "threads and chunk size as in '8x4MiB'"), ("XFERLIB_DEBUG", "7", "'1', or '0' for none")],
)
def test_a_variable_that_cannot_be_read_is_one_line(
    command: list[str],
    variable: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err == (
        f"xferlib: {variable}: expected {expected}, got {value!r}. Set it anew, or unset it: it keeps every backend from opening\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["doctor", "--help"], ["overlap", "host", "--mib", "1"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(words: list[str]) -> None:
    """Also at the end of the process, where the interpreter would write once more what is left."""
    # Without buffers nothing is left.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-m", "xferlib", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    assert ended.stderr == "xferlib: the output could not be written: No space left on device. Make room, or write elsewhere\n"
    assert ended.returncode == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "share"])
@pytest.mark.parametrize(("file", "what"), [(None, "the output"), ("run.png", "'run.png'")], ids=["stdout", "file"])
def test_what_could_not_be_written_for_want_of_room_is_named(
    number: int, file: str | None, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine() -> None:
        raise OSError(number, os.strerror(number), *([] if file is None else [file]))

    monkeypatch.setattr(xferlib.cli.doctor, "examine", examine)
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 1
    told = f"xferlib: {what} could not be written: {os.strerror(number)}. Make room, or write elsewhere\n"
    assert capsys.readouterr().err == told


def test_any_other_error_of_the_system_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(xferlib.cli.doctor, "examine", examine)
    with pytest.raises(OSError, match="Input/output"):
        main(["doctor"])
