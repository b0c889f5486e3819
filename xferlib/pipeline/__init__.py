"""Loops over batches: prefetch to the device, drain to the host, both at once, and slots that batches are written into.

Loops start transfers by a `Stager`, as users do; `host_tree` alone goes to the engine. `one_pass` is what all loops have in common.
`background` and `source_thread` are the thread that iterates a source ahead; `completion` and `unshared` tell when the memory of a
batch may be written again; `phase_timer`, `report` and `memory_estimate` say what a loop waited for and what it costs; `workers`
are worker processes.
"""
