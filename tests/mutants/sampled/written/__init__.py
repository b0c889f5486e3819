"""Mutants that a hostile reader made up: by area, what is replaced in which file."""
