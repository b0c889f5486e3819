"""Other libraries that move the same bytes, one module each. A module imports its library inside `open_peer` and not before."""
