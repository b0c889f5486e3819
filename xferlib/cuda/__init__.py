"""What backends on CUDA need alike, whatever their framework. Nothing else of the core uses it.

A backend pins, copies, records, waits and asks by its framework's own calls: these come here as arguments.
"""
