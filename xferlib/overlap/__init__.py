"""Proof of overlap for users: `measure` times a stager beside compute; `loops` runs a loop that knows nothing of us, while `hold`
holds its work.

`calls`, `order`, `causes` and `verdict` are pure; `driver`, `callbacks` and `parameters` are all that touches CUDA, through ctypes.
"""
