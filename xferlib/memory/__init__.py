"""Who owns memory of host and device, and what NumPy arrays look like in memory.

`table` is what owns memory, and how that grows. `pinned_pool` and `device_pool` are tables; `segments` with `ranges`, and
`idle_blocks`, are their accounts. `registered` locks memory of users, and `mapped` lets the device see it. `pages`, `numa` and
`locker` are how pages are locked, `limits` how many may be. `arrays`, `host` and `proc_maps` say where memory of users lies, and
what it is.
"""
