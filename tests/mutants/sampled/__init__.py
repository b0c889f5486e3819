"""Mutation testing by sample: do the tests notice when a line is wrong? By hand, not collected by pytest.

`python -m tests.mutants.sampled --area memory --seed 20261122` draws 30 mutations of the area's files by the seed, applies each
to a scratch copy of the tree, and runs the area's tests until one fails. `--list` shows the mutants, `--only 7` runs one of them,
`--json FILE` keeps what came out, `--written` runs those of `written/` instead, which a reader made up. A survivor wants a test,
or, where nothing that is promised has changed, a line in `equivalent.md`. Run it with an interpreter that has what the area needs.
"""
