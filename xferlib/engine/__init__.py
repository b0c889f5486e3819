"""The engine: threads of C that move ordinary memory through pinned chunks, beside the interpreter. See engine.h."""
