"""With how many threads and through which chunks pageable memory is copied: given, read, or the default."""

from __future__ import annotations

from typing import Any

import pytest

import xferlib
from xferlib.engine.cores import usable_cores
from xferlib.staging.profile import VARIABLE, StagingProfile

MIB = 1 << 20


@pytest.fixture(autouse=True)
def none_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(("text", "threads", "nbytes"), [("8x4MiB", 8, 4 * MIB), (" 2 x 512kib ", 2, MIB // 2)])
def test_a_shape_is_read(text: str, threads: int, nbytes: int) -> None:
    profile = StagingProfile.parse(text)
    assert (profile.threads, profile.chunk_nbytes) == (threads, nbytes)
    assert StagingProfile.parse(str(profile)) == profile


@pytest.mark.parametrize("text", ["", "8", "x4MiB", "0x4MiB", "4x1KiB", "8x4GB"])
def test_what_cannot_be_read_is_refused_with_its_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected"):
        StagingProfile.parse(text)
    if text:
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ValueError, match=f"{VARIABLE}: .*expected"):
            xferlib.stager("host")


def test_the_environment_gives_the_shape_unless_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3x2MiB")
    with xferlib.stager("host") as stager:
        assert stager.staging == StagingProfile(3, 2 * MIB)
    with xferlib.stager("host", staging=StagingProfile(2, MIB)) as stager:
        assert stager.staging == StagingProfile(2, MIB)


def test_a_program_gives_the_shape_as_the_environment_does() -> None:
    with xferlib.stager("host", staging="3x512KiB") as stager:
        assert stager.staging == StagingProfile(3, MIB // 2)
        with xferlib.Stager(stager.backend, staging="2x1MiB") as another:
            assert another.staging == StagingProfile(2, MIB)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("8", ValueError, "staging: expected threads and chunk size as in '8x4MiB', got '8'"),
        ("", ValueError, "staging: expected threads and chunk size as in '8x4MiB', got ''"),
        ("0x4MiB", ValueError, "staging: threads: expected at least 1"),
        (8, TypeError, "staging: expected text such as '8x4MiB', or a StagingProfile, got 8"),
        ((8, 4 << 20), TypeError, "staging: expected text such as '8x4MiB'"),
    ],
)
def test_a_shape_given_wrong_is_refused_before_anything_is_opened(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        xferlib.stager("no backend of that name", staging=given)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"threads": 2.5}, "threads: expected an int, got 2.5"),
        ({"threads": True}, "threads: expected an int, got True"),
        ({"chunk_nbytes": 1048576.0}, "chunk_nbytes: expected an int, got 1048576.0"),
        ({"hand_off_nbytes": "2"}, "hand_off_nbytes: expected an int, got '2'"),
        ({"hand_off_nbytes": None}, "hand_off_nbytes: expected an int, got None"),
        ({"hand_off_nbytes": -1}, "hand_off_nbytes: expected 0 or more, got -1"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_shape_that_is_none_is_refused(wrong: dict[str, Any], words: str) -> None:
    fields = {"threads": 2, "chunk_nbytes": MIB, "hand_off_nbytes": 0} | wrong
    with pytest.raises((TypeError, ValueError), match=words):
        StagingProfile(**fields)


def test_the_default_has_no_more_threads_than_there_are_cores() -> None:
    with xferlib.stager("host") as stager:
        assert 1 <= stager.staging.threads <= usable_cores()
