"""A CUPTI that calls back, where there is no GPU: see tests/tracing/cupti.c."""

from tests.tracing.conftest import built_cupti

__all__ = ["built_cupti"]
