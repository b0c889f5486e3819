"""What `stream=` takes besides a framework's own streams, and in which words the rest is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xferlib.cuda.streams import handle_of


class Number:
    """As a handle of the driver's bindings."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


def named(found: Any) -> Any:
    """Return an object that gives this as its stream."""
    return SimpleNamespace(__cuda_stream__=lambda: found)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (5, 5),
        (named((0, 7)), 7),
        (named((0, 0)), 0),
        (named([0, 7]), 7),
        (named((0, Number(7))), 7),
        (SimpleNamespace(__cuda_stream__=(0, 7)), 7),
    ],
    ids=["int", "method", "default", "list", "bindings", "property"],
)
def test_a_stream_is_found(stream: object, handle: int) -> None:
    assert handle_of(stream, "ours", "our default") == handle


@pytest.mark.parametrize("stream", [0, -1])
def test_an_int_that_is_no_handle_is_refused_with_what_to_pass(stream: int) -> None:
    with pytest.raises(ValueError, match=f"stream={stream} is no handle. For the default stream pass our default, or leave"):
        handle_of(stream, "ours", "our default")


@pytest.mark.parametrize("stream", [True, 1.5, "7", object()], ids=["bool", "float", "text", "object"])
def test_what_is_no_stream_is_refused_with_what_to_pass(stream: object) -> None:
    with pytest.raises(TypeError, match=r"is no CUDA stream\. Pass ours, an object with __cuda_stream__, or a handle"):
        handle_of(stream, "ours", "our default")


@pytest.mark.parametrize(
    "found", [7, (1, 7), (0, -7), (0, "7"), (0, 7.0), (0, None), (0, 7, 7), None], ids=lambda found: repr(found).replace(" ", "")
)
def test_an_object_that_gives_something_else_is_refused(found: object) -> None:
    with pytest.raises(TypeError, match=r"__cuda_stream__ gave .*, expected \(0, handle\)"):
        handle_of(named(found), "ours", "our default")
