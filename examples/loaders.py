"""Batches from the loaders that people use, each in a few lines. `xferlib.prefetch` takes them as they come out.

All are given the same dataset, the number of images in a batch, and the stager. The packages are imported where they are used.
docs/loaders.md says what each of them copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from tiles import Tiles

import xferlib

Batches: TypeAlias = Iterator[Any]


def generator(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    for indices in tiles.ranges(batch):
        items = [tiles[index] for index in indices]
        yield {"image": np.stack([item["image"] for item in items]), "label": np.array([item["label"] for item in items])}


def in_place(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    with xferlib.Ring(stager, tiles.spec(batch), slots=4) as ring:
        for indices in tiles.ranges(batch):
            slot = ring.acquire()
            slot.rows = tiles.fill(indices, slot.tree)
            yield slot


def worker_processes(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    with xferlib.SharedRing(stager, tiles.spec(batch), slots=6) as ring:
        yield from ring.run(tiles.fill, tiles.ranges(batch), workers=2)


def torch_in_place(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    from torch.utils.data import DataLoader

    with xferlib.Ring(stager, tiles.spec(batch), slots=4) as ring:
        yield from DataLoader(tiles, batch_size=batch, collate_fn=ring.collate)


def torch_workers(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    from torch.utils.data import DataLoader

    loader = DataLoader(tiles, batch_size=batch, num_workers=2, multiprocessing_context="spawn")
    for tensors in loader:
        yield {name: tensor.numpy() for name, tensor in tensors.items()}


def grain_in_place(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    import grain

    with xferlib.Ring(stager, tiles.spec(batch), slots=4) as ring:
        items = grain.MapDataset.source(tiles).to_iter_dataset()
        yield from items.batch(batch, batch_fn=ring.collate)


def grain_loader(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    import grain

    sampler = grain.samplers.SequentialSampler(len(tiles))
    return iter(grain.DataLoader(data_source=tiles, sampler=sampler, operations=[grain.transforms.Batch(batch)]))


def hugging_face(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    import datasets

    image = datasets.Array3D((tiles.side, tiles.side, 3), "uint8")
    features = datasets.Features({"image": image, "label": datasets.Value("int32")})
    rows = datasets.Dataset.from_list([tiles[index] for index in range(len(tiles))], features=features)
    return iter(rows.with_format("numpy", dtype=None).iter(batch_size=batch))


def tf_data(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    import tensorflow as tf

    image = tf.TensorSpec((tiles.side, tiles.side, 3), tf.uint8)
    signature = {"image": image, "label": tf.TensorSpec((), tf.int32)}
    rows = tf.data.Dataset.from_generator(lambda: map(tiles.__getitem__, range(len(tiles))), output_signature=signature)
    return iter(rows.batch(batch).prefetch(2).as_numpy_iterator())


def ray_data(tiles: Tiles, batch: int, stager: xferlib.Stager) -> Batches:
    import ray

    rows = ray.data.from_items([tiles[index] for index in range(len(tiles))])
    return iter(rows.iter_batches(batch_size=batch, batch_format="numpy"))


LOADERS: Mapping[str, Callable[[Tiles, int, xferlib.Stager], Batches]] = {
    "generator": generator,
    "in-place": in_place,
    "workers": worker_processes,
    "torch": torch_in_place,
    "torch-workers": torch_workers,
    "grain": grain_in_place,
    "grain-loader": grain_loader,
    "datasets": hugging_face,
    "tf": tf_data,
    "ray": ray_data,
}
