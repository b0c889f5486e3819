"""What the user should read about CuPy on this machine, whether or not the backend is ready. Needs neither CuPy nor a device."""

from __future__ import annotations

from importlib import metadata

from xferlib_cupy._probe import DISTRIBUTIONS

__all__ = ["findings", "versions"]


def versions() -> dict[str, str]:
    """Return the installed distributions of CuPy."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def findings() -> list[str]:
    """Return sentences."""
    found = []
    installed = versions()
    if len(installed) > 1:
        names = " and ".join(f"{name} {version}" for name, version in installed.items())
        found.append(
            f"{names} are installed over one another and share the folder cupy, as after both CUDA extras at once. "
            f"Uninstall them with: pip uninstall {' '.join(installed)}; then install one"
        )
    if installed and _has_driver() and not _has_nvrtc():
        name = next((name for name in installed if name.startswith("cupy-cuda")), "cupy-cuda13x")
        found.append(
            "CuPy finds no NVRTC: transfers work, but nothing can be compiled, so the demo cannot compute on the GPU. "
            f'Install it with: pip install "{name}[ctk]"'
        )
    return found


def _has_driver() -> bool:
    try:
        from cupy.cuda import runtime

        return bool(runtime.driverGetVersion())
    except Exception:
        # A CuPy that cannot be imported is what opening the backend reports.
        return False


def _has_nvrtc() -> bool:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception:
        # CuPy 13 and 14 raise errors of different kinds, neither of them public.
        return False
    return True
