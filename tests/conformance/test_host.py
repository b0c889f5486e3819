"""The laws, for the host backend: as it is, and as if it page-locked, which lets the laws about pinned memory have their say."""

from __future__ import annotations

from xferlib_host.conformance import TestHost as TestHost

from tests.mutants.laws.locking import LockingHost


class TestLockingHost(LockingHost):
    """Where pinned memory differs, and where it is all the same."""
