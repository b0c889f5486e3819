"""A backend whose arrays are PyTorch's tensors on the CPU: their dtypes are their own, and NumPy refuses them."""
