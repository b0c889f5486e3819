"""Pageable memory at pinned speed: no copy engine reads or writes it directly, so it passes through small pinned chunks.

These are used again so soon that they stay in the processor's cache: one read of the source and no write to memory. A few of them
serve any size. `pageable` is what puts and gets call, and has the engine move the bytes; `bounce` copies what is small on the
caller's thread; `coalesce` says which arrays travel together, `profile` with how many threads and through chunks of which size.
"""
