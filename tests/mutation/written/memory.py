"""Pinned memory: the pool, what it is made of, and memory that callers pin."""

# ruff: noqa: E501  # Quoted code is as long as it is.

from __future__ import annotations

POOL, HOST, ARRAYS, BLOCKS, RANGES, LIMITS, PAGES, MAPPINGS, NODES = (
    f"xferlib/memory/{name}.py" for name in ("pool", "host", "arrays", "blocks", "ranges", "limits", "pages", "mappings", "nodes")
)
PINNING = "xferlib/pinning.py"

MUTANTS = [
    (POOL, "if _round_up(size, PAGE) > self.limit:", "if size > self.limit:"),
    (POOL, "if _round_up(size, PAGE) > self.limit:", "if _round_up(size, PAGE) >= self.limit:"),
    (
        POOL,
        "            if excess <= 0:\n                self.nbytes += nbytes",
        "            if excess < 0:\n                self.nbytes += nbytes",
    ),
    (POOL, "self._arrays + wanted.size > self._arrays_limit", "self._arrays + wanted.size >= self._arrays_limit"),
    (POOL, "limit - min(STAGING_SHARE, limit // 2) if", "limit - STAGING_SHARE if"),
    (POOL, "                for part in (self._small, self._combined):\n", "                for part in (self._small,):\n"),
    (
        POOL,
        "        except BaseException:\n            self._shrink(nbytes)\n            raise\n        with",
        "        except Exception:\n            self._shrink(nbytes)\n            raise\n        with",
    ),
    (POOL, "                ranges.take_at(start, wanted.size)", "                start = ranges.take(wanted.size)"),
    (
        POOL,
        "            # Refused: it is still there, and the next request or trim finds it.\n            self._restore(ranges, start, nbytes)\n",
        "",
    ),
    (POOL, "or changes != self._changes or self._returned:", "or changes != self._changes:"),
    (POOL, "waits = not for_array or self.when_full", "waits = self.when_full"),
    (POOL, "            self._arrays -= nbytes * for_array\n", "            self._arrays -= asked * for_array\n"),
    (POOL, "segment = starts[bisect_right(starts, address) - 1]", "segment = starts[bisect_right(starts, address - 1) - 1]"),
    (POOL, "return index >= 0 and address + nbytes <= ends[index]", "return index >= 0 and address < ends[index]"),
    (
        POOL,
        "ranges = self._combined if wanted.combined else self._class_of(wanted.size)",
        "ranges = self._combined if wanted.combined and wanted.size >= SMALL else self._class_of(wanted.size)",
    ),
    (POOL, "                gc.collect()\n", ""),
    (RANGES, "if end not in self.segments and end in", "if end in"),
    (RANGES, "if start not in self.segments and start in", "if start in"),
    (RANGES, "        self._whole.pop(start, None)\n", ""),
    (
        HOST,
        "            if nbytes > SMALL:\n                found.append((leaf, self.address(leaf)))\n                continue\n",
        "",
    ),
    (HOST, "if type(base) is np.ndarray and base.base is None:", "if type(base) is np.ndarray:"),
    (HOST, " and not self._splits(address, nbytes) else None", " else None"),
    (HOST, "            if not array.flags.c_contiguous:\n                return None\n", ""),
    (ARRAYS, "step = max(1, nbytes // row)", "step = -(-nbytes // row)"),
    (ARRAYS, "if array.nbytes <= nbytes or array.ndim == 0:", "if array.nbytes <= nbytes:"),
    (PINNING, "return after < len(starts) and starts[after] < end", "return after < len(starts) and starts[after] <= end"),
    (PINNING, "if reaches > address:", "if reaches >= address:"),
    (PINNING, "                self.dropped.append(pin)\n                raise", "                raise"),
    (PINNING, "        self._traffic.wait_all()\n        with", "        with"),
    (PAGES, "    if nbytes > available:", "    if nbytes >= available:"),
]
