"""Compute for pipelines, one module for each framework: see `benchmarks.steps.Compute`."""
