"""Proof of overlap for users: `measure` times a stager beside compute, `loops` holds the work of a loop that knows nothing of us.

`calls` and `verdict` are pure; `driver` and `callbacks` are all that touches CUDA, through ctypes.
"""
