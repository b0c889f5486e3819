"""Loops over batches: prefetch to the device, drain to the host, both at once, and slots that batches are written into.

Everything here stands on `Stager` and `Transfer` alone. `feed` is the thread and its bounded queue; `clock`, `report` and `bill`
say what a loop waited for and what it costs; worker processes stand in `shared`.
"""
