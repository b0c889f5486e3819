"""Memory of host and device: what NumPy arrays look like in memory, how much may be pinned, and the two pools."""
