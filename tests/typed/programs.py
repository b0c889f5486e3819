"""Programs for type checkers, never run: what is right, and misspelt names, each with the error that a checker must find there."""

from __future__ import annotations

__all__ = ["PROGRAMS"]

HEADER = """
import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, assert_type

import numpy as np

import xferlib

Array = np.ndarray[Any, np.dtype[Any]]

class Batch(TypedDict):
    image: Any
    label: Any

class Pair(NamedTuple):
    image: Array
    label: Array

@dataclass
class Record:
    image: Any

def batches() -> Iterator[Batch]:
    yield {"image": np.zeros(3), "label": np.zeros(3)}

def pairs() -> Iterator[Pair]:
    yield Pair(np.zeros(3), np.zeros(3))

def plain() -> Iterator[dict[str, Array]]:
    yield {"image": np.zeros(3)}

class DeviceArray:
    dtype: Any
"""

PROGRAMS = {
    "puts": """
def puts(stager: xferlib.Stager, batch: Batch, pair: Pair, record: Record, array: Array, known: dict[str, Array]) -> None:
    stager.put(batch).value["image"].anything()
    stager.put(batch).value["imgae"]  # E: typeddict-item
    stager.put(pair).result().label
    stager.put(pair).result().lable  # E: attr-defined
    stager.put(record).value.image
    stager.put(record).value_on(3).imgae  # E: attr-defined
    stager.put(array).value.anything()
    stager.put(np.zeros(3)).value.anything()
    stager.put(known).value["image"].anything()
    stager.put(known).value[0]  # E: index
    image, label = stager.put((array, array)).value
    image.anything()
    assert_type(stager.put({"x": array, "name": "a"}), xferlib.Transfer[dict[str, Any]])
    assert_type(stager.put(array, into=batch), xferlib.Transfer[Batch])
    assert_type(stager.put(array).completion, xferlib.Transfer[None])
    stager.put(batch).valeu  # E: attr-defined
""",
    "gets": """
def gets(stager: xferlib.Stager, batch: Batch, array: DeviceArray, host: Array, known: dict[str, DeviceArray]) -> None:
    stager.get(batch).result()["imgae"]  # E: typeddict-item
    assert_type(stager.get(array), xferlib.Transfer[Array])
    assert_type(stager.get(known), xferlib.Transfer[dict[str, Any]])
    assert_type(stager.get(array, out=host).result(), Array)
    assert_type(stager.get(batch, out=batch), xferlib.Transfer[Batch])

async def awaited(stager: xferlib.Stager, batch: Batch, array: DeviceArray) -> None:
    (await stager.put(batch))["imgae"]  # E: typeddict-item
    assert_type(await stager.get(array), Array)
    assert_type(await asyncio.wait_for(stager.get(array), 1), Array)

def bare(transfer: xferlib.Transfer) -> None:
    transfer.value.anything()
""",
    "loops": """
def loops(stager: xferlib.Stager) -> None:
    with xferlib.prefetch(batches(), stager) as loop:
        for batch in loop:
            batch["image"].anything()
            batch["imgae"]  # E: typeddict-item
    next(loop)["imgae"]  # E: typeddict-item
    for pair in xferlib.prefetch(pairs(), stager):
        pair.imgae  # E: attr-defined
    for known in xferlib.prefetch(plain(), stager):
        known["image"].anything()
    for array in xferlib.prefetch((np.zeros(3) for _ in range(3)), stager):
        array.anything()
    for image, label in xferlib.prefetch([(np.zeros(3), np.zeros(3))], stager):
        image.anything()
    mine: xferlib.Prefetch[Batch] = xferlib.prefetch(batches(), stager)
    other: xferlib.Prefetch[Pair] = xferlib.prefetch(batches(), stager)  # E: arg-type
    assert_type(xferlib.prefetch([], stager), xferlib.Prefetch[Any])
""",
    "drains": """
def step(batch: Batch) -> Batch:
    batch["imgae"]  # E: typeddict-item
    return batch

def on_device(batch: DeviceArray) -> DeviceArray:
    return batch

def drains(stager: xferlib.Stager, out: Batch) -> None:
    for result in xferlib.drain(batches(), stager):
        result["imgae"]  # E: typeddict-item
    for mapped in xferlib.stream_map(step, batches(), stager):
        mapped["imgae"]  # E: typeddict-item
    assert_type(xferlib.stream_map(on_device, [np.zeros(3)], stager), xferlib.Drained[Array])
    assert_type(xferlib.stream_map(on_device, [np.zeros(3)], stager, out=out), xferlib.Drained[Batch])
    assert_type(xferlib.drain([DeviceArray()], stager), xferlib.Drained[Array])
    with xferlib.Drain(stager, out=out) as drain:
        for result in drain.results():
            result["imgae"]  # E: typeddict-item
    assert_type(xferlib.Drain[Pair](stager).results(), xferlib.Results[Pair])
""",
    "rings": """
def fill(task: int, slot: Batch) -> None:
    slot["image"][:] = task

def wrong(task: int, slot: Pair) -> None: ...

def rings(stager: xferlib.Stager) -> None:
    ring: xferlib.Ring[Batch] = xferlib.Ring(stager, {})
    slot = ring.acquire()
    slot["image"][:] = 0
    slot.tree["imgae"][:] = 0  # E: typeddict-item
    slot.put().value["imgae"]  # E: typeddict-item
    for batch in xferlib.prefetch(iter(ring.acquire, None), stager):
        batch["imgae"]  # E: typeddict-item
    assert_type(xferlib.Ring(stager, {}), xferlib.Ring[Any])
    shared: xferlib.SharedRing[Batch] = xferlib.SharedRing(stager, {})
    run: xferlib.Run[Batch] = shared.run(fill, range(3))
    for filled in run:
        filled["imgae"]  # E: typeddict-item
    shared.run(wrong, range(3))  # E: arg-type
""",
    "face": """
def face(stager: xferlib.Stager, array: Array, pin: xferlib.Pin, memory: xferlib.MemoryEstimate, old: xferlib.Bill) -> None:
    pin = stager.pin(array)
    xferlib.prefecth  # E: attr-defined
    assert_type(xferlib.load("a.npz", stager, names=["a"]), dict[str, Any])
    xferlib.load("a.npy", stager).anything()

def loads(stager: xferlib.Stager, batch: Batch) -> None:
    xferlib.load(["a.safetensors", Path("b.safetensors")], stager, dtype={"*.bias": np.float32}, progress=True).anything()
    assert_type(xferlib.load("a.npz", stager, names=["a."], dtype="float16", progress=told), dict[str, Any])
    xferlib.load("a.npz", stager, progress=wrong)  # E: arg-type
    assert_type(xferlib.load("a.npz", stager, like=batch), Batch)

def told(done: int, total: int) -> None: ...

def wrong(done: str) -> None: ...
""",
    "sharded": """
import xferlib_jax

def sharded(sharding: object) -> None:
    with xferlib_jax.prefetch(batches(), sharding) as loop:
        for batch in loop:
            batch["imgae"]  # E: typeddict-item
    xferlib_jax.load("a.npz", sharding)["a"].anything()
    assert_type(xferlib_jax.load("a.npz", sharding, names=["a"]), dict[str, Any])
    assert_type(xferlib_jax.load("a.npz", like=next(batches())), Batch)
    mine: xferlib_jax.ShardedPrefetch[Batch] = xferlib_jax.prefetch_to_device(batches())
    xferlib_jax.prefecth  # E: attr-defined
""",
}
"""By their names. A line with an error says which: `# E: code`."""
PROGRAMS = {name: HEADER + program for name, program in PROGRAMS.items()}
