"""The shape of the ring: given, read, or measured."""

from __future__ import annotations

import pytest

import xferlib
from xferlib.staging.calibration import CHUNKS, THREADS, measured_profile
from xferlib.staging.profile import VARIABLE, StagingProfile

MIB = 1 << 20


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


def test_what_is_measured_is_one_of_the_shapes_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    profile = measured_profile()
    assert profile.threads in THREADS
    assert profile.chunk_nbytes in CHUNKS
    assert profile.hand_off_nbytes % 4096 == 0
    assert measured_profile() is profile
    with xferlib.stager("host") as stager:
        assert stager.staging is profile
