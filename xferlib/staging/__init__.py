"""Pageable memory at pinned speed: no copy engine reads or writes it directly, so it passes through small pinned chunks.

The chunks are used again so soon that they stay in the processor's cache: this costs one read of the source and no write to memory.
A few of them serve any size. Puts and gets call `pageable`, which has the engine move the bytes. `bounce` copies small arrays on
the caller's thread. `coalesce` says which arrays travel together; `profile` says how many threads copy, and through chunks of which
size.
"""
