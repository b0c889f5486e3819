"""The chunk ring: pageable memory at pinned speed.

No copy engine reads or writes pageable memory directly. So threads copy it through small pinned chunks, which are used again so
soon that they stay in the processor's cache: one read of the source and no write to memory. A few chunks serve any size.

`parts` cuts transfers, `chunks` owns the pinned memory of one stager, `crew` the threads of the process, `job` what several threads
do together, `fill` and `land` are what they do in each direction, `profile`, `saved` and `calibration` say with how many and how
large, `ring` is what puts and gets call.
"""
