"""Who tests the tests: code that is wrong on purpose, and what must find it.

- `laws`: a backend, a hook or a piece of the core breaks one promise. The law that the mutant names finds it, by an assertion.
- `engine`: a line of the engine's C is wrong. The harness finds it, sometimes under a sanitizer.
- `planted`: a line that keeps memory or order right is wrong. The random programs find it: `python -m tests.mutants.planted`.
- `sampled`: any line is wrong, drawn by a seed or written by a reader who has not seen the tests. The area's tests find it:
  `python -m tests.mutants.sampled`.

pytest runs the first two, and a few of the third. `test_places` looks that each written one still has its place.
"""
