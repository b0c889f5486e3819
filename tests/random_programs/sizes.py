"""Which sizes, dtypes and layouts a program has: few of each, so that memory is used again, and near every boundary in the code.

Those of large programs are spread over all magnitudes.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, TypeAlias, final

import numpy as np

from tests.random_programs.content import dtype_named
from tests.random_programs.traits import Traits

__all__ = ["Group", "Palette"]

Group: TypeAlias = list[Any]
"""How many leaves, and of each: dtype, shape, layout, memory. As JSON."""

TINY = (0, 1, 8, 255, 256, 257, 1000, 4096)
PACKED = (65_535, 65_536, 65_537, 60_000, 8192)
"""Up to here, and up to the first of the next, leaves share a block."""
MIDDLE = (72 << 10, 128 << 10, 200_000, 256 << 10, 300_000)
LARGE = (1 << 20, (1 << 20) - 1, (1 << 20) + 256, (2 << 20) - 256, 2 << 20, (2 << 20) + 256, 3_000_000)
STAGING = (
    (1, 64 << 10, 2 << 20),
    (2, 256 << 10, 2 << 20),
    (2, 4 << 10, 16 << 10),
    (3, 16 << 10, 64 << 10),
    (2, 64 << 10, 64 << 10),
    (3, 256 << 10, 256 << 10),
    (2, 1 << 20, 1 << 20),
)
"""Threads, bytes of a chunk, and of the transfers from which on several threads copy."""
LEAST, MOST, MOST_ON_GPU = 8, 40 << 20, 256 << 20
"""Bytes of an array of a large program: less than a page, up to dozens of the product's own chunks."""
BOUNDARIES = ((512 << 10), (512 << 10) + 1, 1 << 20, (1 << 20) + 1, (8 << 20) - 1, 8 << 20, 9 << 20)
"""Bytes from which on threads copy, chunks are full, and results are page-locked later, where nothing else is asked for."""
LARGE_STAGING = (None, (1, 1 << 20, 512 << 10), (3, 64 << 10, 512 << 10), (8, 1 << 20, 512 << 10), (2, 256 << 10, 512 << 10))
LIMITS = (48 << 20, 128 << 20, 512 << 20)
"""Bytes of pinned memory of a stager of a large program."""
LAYOUTS = ("C", "C", "C", "C", "F", "steps", "backwards", "offset")
MEMORIES = ("pinned", "pinned", "pinned", "pageable", "pageable", "view", "readonly", "memmap")
MANY = (15, 16, 17, 40, 150, 600)


@final
class Palette:
    """What one program draws its arrays from."""

    def __init__(self, random: Random, traits: Traits, *, large: bool = False) -> None:
        self._random = random
        self._traits = traits
        self.large = large
        self.staging: tuple[int, int, int] | None
        """None: the product's own."""
        if large:
            self.staging = random.choice(LARGE_STAGING)
            self.most_nbytes = MOST_ON_GPU if traits.on_gpu else MOST
            self.sizes = [self._of_any_magnitude() for _ in range(random.randint(4, 8))]
        else:
            self.staging, self.sizes, self.most_nbytes = self._few()
        if traits.held_sizes and random.random() < 0.7:
            self.sizes += [random.choice(traits.held_sizes[: 2 if self.most_nbytes == 1 << 20 else 3])] * 2
        if random.random() < 0.7:
            self.sizes += [random.choice((256, 4096, 30_000))]
        some = random.sample(traits.dtypes, min(3, len(traits.dtypes)))
        self.dtypes = ["uint8", "uint8", *some]

    def _of_any_magnitude(self) -> int:
        if self._random.random() < 0.2:
            return self._random.choice(BOUNDARIES)
        return int(2 ** self._random.uniform(math.log2(LEAST), math.log2(self.most_nbytes)))

    def _few(self) -> tuple[tuple[int, int, int], list[int], int]:
        """Draw how pageable memory is staged, a few sizes, and the most bytes of one tree."""
        random = self._random
        staging = random.choice(STAGING)
        chunk = staging[1]
        weight = random.choices(("small", "middle", "large"), (55, 29, 16))[0]
        around = (chunk - 256, chunk, chunk + 1, chunk + 256, 3 * chunk + 1000)
        pools = {
            "small": (*TINY, *TINY, *PACKED, *(size for size in around if size < 1 << 17)),
            "middle": (*TINY, *PACKED, *MIDDLE, *MIDDLE, chunk, chunk + 1),
            "large": (*TINY, *PACKED, *MIDDLE, *LARGE, *LARGE, *around),
        }
        sizes = [random.choice(pools[weight]) for _ in range(random.randint(1, 4))]
        return staging, sizes, {"small": 1 << 20, "middle": 2 << 20, "large": 8 << 20}[weight]

    def groups(self, *, memory: str | None = None, plain: bool = False) -> list[Group]:
        """Draw the leaves of one tree. `plain`: in C order and none empty."""
        random = self._random
        kinds = random.choices((1, 2, 3), (6, 3, 1))[0]
        if random.random() < 0.55:
            counts = [1] if kinds == 1 else [1] * kinds
        elif random.random() < 0.8:
            counts = [random.randint(1, 6) for _ in range(kinds)]
        else:
            counts = [random.choice(MANY)]
        groups, left = [], self.most_nbytes
        for count in counts:
            group = self.group(count, memory=memory, plain=plain, most=left // count)
            groups.append(group)
            left -= count * int(np.prod(group[2], dtype=np.int64)) * dtype_named(group[1]).itemsize
        return groups

    def group(self, count: int = 1, *, memory: str | None = None, plain: bool = False, most: int = 1 << 30) -> Group:
        random = self._random
        size = random.choice([size for size in self.sizes if size <= most and (size or not plain)] or [256 if most >= 256 else 1])
        dtype = random.choice(self.dtypes)
        if size in self._traits.held_sizes and random.random() < 0.8:
            dtype = "uint8"
        items = max(size // dtype_named(dtype).itemsize, 1 if plain else 0)
        layout = "C" if plain or not items else random.choice(LAYOUTS)
        kind = memory or random.choice(MEMORIES)
        return [count, dtype, self._shape(items, flat=dtype == "uint8" and random.random() < 0.6), layout, kind]

    def _shape(self, items: int, *, flat: bool) -> list[int]:
        random = self._random
        if items == 0:
            return random.choice(([0], [3, 0, 2]))
        if items == 1 and random.random() < 0.5:
            return []
        if flat or random.random() < 0.5:
            return [items]
        rows = random.choice([rows for rows in (2, 3, 4, 5, 8, 16) if items % rows == 0] or [1])
        return [rows, items // rows]
