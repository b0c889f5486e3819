"""Host memory: what NumPy arrays look like in memory, how much may be pinned, and the bounded pinned pool."""
