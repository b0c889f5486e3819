"""Batches that worker processes write straight into pinned memory. See `ring`."""
