"""Proof of overlap for users: `measure` times a stager beside compute; `loops` runs a loop that knows nothing of us, while `hold`
holds its work.

`calls`, `happens_before`, `causes` and `verdict` are pure. `libcuda`, `callbacks` and `parameters` are all that touches CUDA, by
ctypes.
"""
