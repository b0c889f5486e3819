"""Groups whose home is the host, with arrays of every framework: order while copies are held, and work that is not waited for."""

from __future__ import annotations

import numpy as np

import xferlib
from tests.frameworks.kits.every import KITS, given
from tests.frameworks.kits.kit import Kit
from xferlib.conformance import StagerConformance
from xferlib.conformance.values import assert_same, words
from xferlib.stager import Stager

every_kit = given(*KITS)


@every_kit
def test_a_fetch_behind_a_held_store_has_what_is_stored(kit: Kit, laws: StagerConformance, stager: Stager) -> None:
    old, new = words(1 << 20), words(1 << 20) + 1
    arrays = laws.from_numpy(new)
    with xferlib.HostTree({"a": {"x": old}, "b": old}, stager) as home:
        for warm in (arrays, laws.from_numpy(old)):
            home.store("a", {"x": warm})
            home.fetch(["a", "b"]).result()
        with laws.hold_copies(stager.backend, "d2h") as hold:
            store = laws.assert_returns(lambda: home.store("a", {"x": arrays}))
            fetched = laws.calls.start(lambda: home.fetch("a"))
            laws.assert_stays(lambda: not (fetched.done() or store.done()), hold)
            other = laws.assert_returns(lambda: home.fetch("b").result())
            hold.release()
        got = fetched.result(laws.deadline_seconds).result()
        assert_same(laws.to_numpy(got["x"]), new)
        assert_same(laws.to_numpy(other), old)


@every_kit
def test_a_store_does_not_overwrite_what_a_held_fetch_reads(kit: Kit, laws: StagerConformance, stager: Stager) -> None:
    old, new = words(1 << 20), words(1 << 20) + 1
    arrays = laws.from_numpy(new)
    with xferlib.HostTree({"a": old}, stager) as home:
        home.fetch("a").result()
        with laws.hold_copies(stager.backend, "h2d") as hold:
            fetched = laws.assert_returns(lambda: home.fetch("a"))
            store = laws.calls.start(lambda: home.store("a", arrays))
            laws.assert_stays(lambda: not store.done(), hold)
            hold.release()
        assert_same(laws.to_numpy(fetched.result()), old)
        store.result(laws.deadline_seconds).synchronize()
        assert_same(home["a"], new)


@every_kit
def test_a_store_waits_for_no_producer_and_has_what_it_leaves(kit: Kit, laws: StagerConformance, stager: Stager) -> None:
    new = words(1000)
    with xferlib.HostTree({"a": np.zeros_like(new)}, stager) as home:
        home.store("a", laws.from_numpy(new + 5)).synchronize()
        with laws.held_array(stager.backend, new) as held:
            store = laws.assert_returns(lambda: home.store("a", held.array, stream=held.stream))
            laws.assert_stays_undone(store, held)
            held.release()
        assert_same(home["a"], new)
