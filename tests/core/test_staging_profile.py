"""The shape of the ring: given, read, or measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import xferlib
from tests.core.fakes import tampered
from xferlib.staging.calibration import CHUNKS, LITTLE, THREADS, _Bench, measured_profile
from xferlib.staging.profile import VARIABLE, StagingProfile
from xferlib.staging.saved import save_profile, saved_path, saved_profile

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep shapes in a folder of the test's own, and give none."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


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
def test_a_shape_that_is_none_is_refused_also_where_it_was_kept(
    wrong: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"threads": 2, "chunk_nbytes": MIB, "hand_off_nbytes": 0} | wrong
    with pytest.raises((TypeError, ValueError), match=words):
        StagingProfile(**fields)
    monkeypatch.setattr("xferlib.staging.saved._machine", lambda: "MACHINE")
    saved_path().parent.mkdir()
    saved_path().write_text(json.dumps({"MACHINE": fields}))
    with pytest.warns(RuntimeWarning, match=f"staging.json cannot be used .*{words}"):
        assert saved_profile() is None


def test_what_is_measured_is_one_of_the_shapes_tried() -> None:
    profile = measured_profile()
    assert profile.threads in THREADS
    assert profile.chunk_nbytes in CHUNKS
    assert profile.hand_off_nbytes % 4096 == 0
    assert measured_profile() is profile
    with xferlib.stager(tampered()) as stager:
        assert stager.staging is profile


def test_where_there_is_little_memory_little_is_taken_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.staging.calibration.available_memory", lambda: 1 << 30)
    bench = _Bench(1)
    assert bench._source.nbytes == LITTLE
    bench.close()


def test_a_kept_shape_is_used_until_something_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = StagingProfile(3, MIB // 2, 5 * MIB)
    assert saved_profile() is None
    assert save_profile(kept) == saved_path()
    assert saved_profile() == kept
    with xferlib.stager(tampered()) as stager:
        assert stager.staging == kept
    monkeypatch.setenv(VARIABLE, "2x1MiB")
    with xferlib.stager("host") as stager:
        assert stager.staging == StagingProfile(2, MIB)


def test_a_shape_is_kept_for_its_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = StagingProfile(3, MIB), StagingProfile(5, 2 * MIB)
    save_profile(mine)
    monkeypatch.setattr("xferlib.staging.saved._machine", lambda: "another, 96 cores")
    assert saved_profile() is None
    save_profile(other)
    assert saved_profile() == other


def test_shapes_of_two_machines_lie_side_by_side(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"one, 2 cores": StagingProfile(1, MIB), "two, 8 cores": StagingProfile(7, 2 * MIB)}
    for machine, shape in shapes.items():
        monkeypatch.setattr("xferlib.staging.saved._machine", lambda name=machine: name)
        save_profile(shape)
    for machine, shape in shapes.items():
        monkeypatch.setattr("xferlib.staging.saved._machine", lambda name=machine: name)
        assert saved_profile() == shape
    assert [path.name for path in saved_path().parent.iterdir()] == ["staging.json"]


@pytest.mark.parametrize("text", ["", "[1, 2]", "nonsense", '{"MACHINE": {"threads": 0, "chunk_nbytes": 4096}}', '{"MACHINE": 3}'])
def test_a_file_that_cannot_be_used_is_told_and_measured_over(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.staging.saved._machine", lambda: "MACHINE")
    saved_path().parent.mkdir()
    saved_path().write_text(text)
    with pytest.warns(RuntimeWarning, match="staging.json cannot be used .*doctor --save-staging"):
        assert saved_profile() is None
    save_profile(StagingProfile(2, MIB))
    assert saved_profile() == StagingProfile(2, MIB)
