"""Why CUDA cannot be used here, in words."""

from __future__ import annotations

import pytest

from xferlib.cuda.refusals import NO_DEVICE, device_not_there, failed_with


@pytest.mark.parametrize(
    ("status", "reason", "advice"),
    [
        (2, "has no memory left", "another with device=N"),
        (3, "was forked", "the spawn or forkserver method"),
        (34, "stub for linking", "LD_LIBRARY_PATH"),
        (46, "taken by another process", "nvidia-smi -c 0"),
        (802, "not ready", "fabric manager"),
        (803, "do not match", "Reboot"),
    ],
)
def test_a_known_status_says_what_it_means_and_what_to_do(status: int, reason: str, advice: str) -> None:
    found = failed_with(status, "as the framework has it")
    assert reason in found[0]
    assert advice in found[1]


@pytest.mark.parametrize(("said", "shown"), [(None, "status 999"), ("", "status 999"), (OSError("it broke"), "it broke")])
def test_any_other_status_says_what_is_known(said: object, shown: str) -> None:
    reason, _ = failed_with(999, said)
    assert reason == f"CUDA failed ({shown})"


@pytest.mark.parametrize(("value", "shown"), [(None, ""), ("", ", with CUDA_VISIBLE_DEVICES=''")])
def test_what_hides_devices_is_named(monkeypatch: pytest.MonkeyPatch, value: str | None, shown: str) -> None:
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    reason, advice = failed_with(NO_DEVICE)
    assert reason == f"CUDA reports no device (CUDA_ERROR_NO_DEVICE){shown}"
    assert ("CUDA_VISIBLE_DEVICES" in advice) == bool(shown)
    assert device_not_there(3, 1) == (f"there is no device 3: CUDA shows only number 0{shown}", "Pick one of these with device=N")
    assert device_not_there(-1, 4)[0] == f"there is no device -1: CUDA shows numbers 0 to 3{shown}"
