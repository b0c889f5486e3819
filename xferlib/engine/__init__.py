"""The engine: threads in C that move pageable memory through pinned chunks, beside the interpreter. See engine.h."""
