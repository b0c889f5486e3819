"""Finding backends: by name, by choice, from a stranger's package, or handed over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xferlib
from tests.core.fakes import tampered
from xferlib import ledger, registry
from xferlib.errors import BackendUnavailableError, UnknownBackendError
from xferlib.memory import device_pool
from xferlib.stager import open_stagers


class Entry:
    """An entry point, as `importlib.metadata` gives it."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = f"strange_{name}:{id(value)}"
        self.module = f"strange_{name}"
        self._opener = value

    def load(self) -> Any:
        return self._opener


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    found: list[Entry] = []

    def entry_points(*, group: str, name: str | None = None) -> list[Entry]:
        assert group == "xferlib.backends"
        return [entry for entry in found if name is None or entry.name == name]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_entries", {})
    return found


class Opens:
    """An opener that counts."""

    def __init__(self, **replaced: Any) -> None:
        self.replaced = replaced
        self.opened: list[Any] = []
        self.closed: list[Any] = []

    def __call__(self, *, device: int = 0) -> Any:
        backend = tampered(**self.replaced, device=f"device {device}")

        def close() -> None:
            self.closed.append(backend)
            backend.inner.close()

        backend.close = close
        self.opened.append(backend)
        return backend


def unavailable(*, device: int = 0) -> Any:
    raise BackendUnavailableError("backend 'gone' cannot run here: no driver. Install one")


def test_the_names_are_sorted_and_each_is_there_once(installed: list[Entry]) -> None:
    installed += [Entry("zeta", unavailable), Entry("alpha", unavailable), Entry("zeta", unavailable)]
    assert xferlib.backends() == ("alpha", "zeta")


@pytest.mark.parametrize("name", ["hosd", "hots", "HOST"])
def test_an_unknown_name_comes_with_a_suggestion(name: str) -> None:
    with pytest.raises(UnknownBackendError, match=rf"no installed package provides backend '{name}'\. Did you mean 'host'\?.*host"):
        xferlib.stager(name)


@pytest.mark.parametrize("name", ["numpy", "CPU"])
def test_names_of_the_processor_and_its_library_mean_the_host(name: str) -> None:
    with pytest.raises(UnknownBackendError, match=r"Did you mean 'host'\?"):
        xferlib.stager(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:0", "torch", ""])
def test_names_of_no_library_come_with_what_a_name_stands_for(name: str) -> None:
    with pytest.raises(UnknownBackendError, match=r'named after the library that you compute with. "auto" takes what is ready'):
        xferlib.stager(name)


def test_a_device_is_a_number() -> None:
    with pytest.raises(TypeError, match="device='cuda:0': expected a number"):
        xferlib.stager("host", device="cuda:0")  # type: ignore[arg-type]  # The point of the test.


def test_an_unknown_name_like_no_other_comes_with_the_list(installed: list[Entry]) -> None:
    with pytest.raises(UnknownBackendError, match="Installed: none"):
        xferlib.stager("zzz")
    installed.append(Entry("alpha", unavailable))
    with pytest.raises(LookupError, match=r"provides backend 'zzz'\. .* needs no GPU\. Installed: alpha"):
        xferlib.stager("zzz")


def test_two_packages_of_one_name_are_refused(installed: list[Entry]) -> None:
    installed += [Entry("twice", Opens()), Entry("twice", Opens())]
    with pytest.raises(UnknownBackendError, match=r"several installed packages provide backend 'twice'.*Uninstall all but one"):
        xferlib.stager("twice")


def test_one_package_seen_twice_is_one(installed: list[Entry]) -> None:
    opens = Opens()
    installed += [Entry("same", opens), Entry("same", opens)]
    xferlib.stager("same", device=3).close()
    assert [backend.device for backend in opens.opened] == ["device 3"]


def test_auto_takes_the_first_that_is_ready_on_a_gpu(installed: list[Entry]) -> None:
    fallback, first, second = Opens(fallback=True), Opens(on_gpu=True, name="b"), Opens(on_gpu=True)
    installed += [Entry("c", second), Entry("b", first), Entry("a", fallback), Entry("0", unavailable)]
    with xferlib.stager() as chosen:
        assert chosen.backend is first.opened[0]
        assert "'b'" in repr(chosen)
    assert fallback.closed == fallback.opened
    assert second.opened == []


def test_auto_takes_the_first_fallback_where_no_gpu_is_ready(installed: list[Entry]) -> None:
    refuses, first, second = Opens(fallback=False), Opens(fallback=True), Opens(fallback=True)
    installed += [Entry("a", refuses), Entry("b", first), Entry("c", second), Entry("d", unavailable)]
    with xferlib.stager("auto") as chosen:
        assert chosen.backend is first.opened[0]
    assert refuses.closed == refuses.opened
    assert second.closed == second.opened


def test_auto_says_why_nothing_is_ready(installed: list[Entry]) -> None:
    with pytest.raises(BackendUnavailableError, match="none is installed"):
        xferlib.stager()
    installed.append(Entry("gone", unavailable))
    with pytest.raises(BackendUnavailableError, match="backend 'gone' cannot run here: no driver"):
        xferlib.stager()


def test_a_broken_package_passes_through_and_leaves_nothing_open(installed: list[Entry]) -> None:
    def broken(*, device: int = 0) -> Any:
        raise ImportError("libsomething.so")

    fallback = Opens(fallback=True)
    installed += [Entry("a", fallback), Entry("b", broken)]
    with pytest.raises(ImportError, match="libsomething"):
        xferlib.stager()
    assert fallback.closed == fallback.opened


@pytest.mark.parametrize("limits", [{"pinned_limit": 0}, {"device_limit": -1}, {"pinned_limit": 1e9}])
def test_a_limit_that_is_refused_leaves_no_backend_open(installed: list[Entry], limits: dict[str, Any]) -> None:
    opens = Opens()
    installed.append(Entry("a", opens))
    with pytest.raises((TypeError, ValueError), match=next(iter(limits))):
        xferlib.stager("a", **limits)
    assert opens.closed == opens.opened


def test_a_variable_that_is_refused_leaves_no_backend_open(installed: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opens()
    installed.append(Entry("a", opens))
    monkeypatch.setenv("XFERLIB_STAGING", "much")
    with pytest.raises(ValueError, match="XFERLIB_STAGING"):
        xferlib.stager("a")
    assert opens.closed == opens.opened


def test_an_interrupt_while_a_stager_is_opened_leaves_nothing_open(installed: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opens()
    installed.append(Entry("a", opens))
    before = len(ledger.all_ledgers()), len(device_pool._open), open_stagers()

    def strike() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["xferlib.stager"], "start_reaper", strike)
    with pytest.raises(KeyboardInterrupt):
        xferlib.stager("a")
    assert opens.closed == opens.opened != []
    assert (len(ledger.all_ledgers()), len(device_pool._open), open_stagers()) == before


def test_a_backend_of_your_own_may_be_passed() -> None:
    backend = tampered(name="mine")
    with xferlib.stager(backend) as stager:
        assert stager.backend is backend
        assert stager.name == "mine"


@pytest.mark.parametrize("wrong", [None, 5, object(), tampered])
def test_what_is_no_backend_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="backend"):
        xferlib.stager(wrong)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of somebody else's, as an installer would leave it."""
    package = tmp_path / "strangers_backend"
    package.mkdir()
    (package / "__init__.py").write_text("from xferlib_host import open_stager as open_it\n")
    (package / "workload.py").write_text("ANSWER = 42\n")
    info = tmp_path / "strangers_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xferlib.backends]\nstranger = strangers_backend:open_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "stranger"
    for name in [name for name in sys.modules if name.startswith("strangers_backend")]:
        del sys.modules[name]


def test_a_stranger_s_package_is_found_like_ours(stranger: str) -> None:
    assert stranger in xferlib.backends()
    assert "strangers_backend" not in sys.modules
    xferlib.stager(stranger).close()
    part = registry.backend_module(stranger, "workload")
    assert part is not None
    assert part.ANSWER == 42
    assert registry.backend_module(stranger, "conformance") is None


def test_packages_are_asked_once_for_a_backend_that_is_there(installed: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    usual: Any = vars(registry)["entry_points"]

    def entry_points(*, group: str, name: str | None = None) -> list[Entry]:
        asked.append(name)
        return list(usual(group=group, name=name))

    monkeypatch.setattr(registry, "entry_points", entry_points)
    with pytest.raises(UnknownBackendError):
        xferlib.stager("late")
    installed.append(Entry("late", Opens()))
    for _ in range(3):
        registry.open_backend("late")
    assert asked.count("late") == 2, "once before it was installed, once behind"
    monkeypatch.syspath_prepend("/nowhere")
    registry.open_backend("late")
    assert asked.count("late") == 3, "other packages may be there"


def test_what_a_part_of_a_backend_lacks_is_not_taken_for_the_part(stranger: str, tmp_path: Path) -> None:
    (tmp_path / "strangers_backend" / "diagnosis.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        registry.backend_module(stranger, "diagnosis")


def test_a_stager_says_what_it_is() -> None:
    with xferlib.stager("host") as stager:
        assert (stager.name, stager.on_gpu) == ("host", False)
        assert stager.device.startswith("the CPU (")
        assert stager.capabilities is stager.backend.capabilities
