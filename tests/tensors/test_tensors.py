"""What a program does with tensors: their dtypes are not NumPy's, and nothing else is different."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.tensors.hooks import open_tensors

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager(open_tensors()) as opened:
        yield opened


@pytest.fixture
def torch(stager: xferlib.Stager) -> Any:
    import torch

    return torch


def test_a_tensor_has_the_dtype_of_its_framework_and_comes_back_with_numpys(stager: xferlib.Stager, torch: Any) -> None:
    with pytest.raises(TypeError):
        np.dtype(torch.float32)
    tensor = stager.put(VALUES).value
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, torch.from_numpy(VALUES))
    got = stager.get(tensor + 1).result()
    assert got.dtype == np.float32
    assert np.array_equal(got, VALUES + 1)


def test_bfloat16_crosses_as_it_is(stager: xferlib.Stager, torch: Any) -> None:
    from ml_dtypes import bfloat16

    tensor = stager.put(VALUES.astype(bfloat16)).value
    assert tensor.dtype == torch.bfloat16
    got = stager.get(tensor * 2).result()
    assert got.dtype == bfloat16
    assert np.array_equal(got.astype(np.float32), 2 * VALUES)


def test_trees_keep_their_structure_both_ways(stager: xferlib.Stager, torch: Any) -> None:
    tree = stager.put({"image": VALUES, "labels": [VALUES[0].astype(np.int64), "a name"]}).value
    assert isinstance(tree["labels"][0], torch.Tensor)
    out: Any = {"image": np.empty_like(VALUES), "labels": [np.empty(4, np.int64), "another name"]}
    stager.get(tree, out=out).synchronize()
    assert np.array_equal(out["image"], VALUES)
    assert np.array_equal(out["labels"][0], VALUES[0])


def test_a_tensor_of_the_callers_is_overwritten(stager: xferlib.Stager, torch: Any) -> None:
    tensor = torch.zeros(3, 4)
    assert stager.put(VALUES, into=tensor).value is tensor
    assert torch.equal(tensor, torch.from_numpy(VALUES))
    with pytest.raises(ValueError, match="into is of dtype int32, and what is put into it of dtype float32"):
        stager.put(VALUES, into=torch.zeros(3, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="into has the wrong shape"):
        stager.put(VALUES, into=torch.zeros(4, 3))


def test_a_dtype_that_the_backend_does_not_know_is_refused_in_the_backends_words(stager: xferlib.Stager, torch: Any) -> None:
    with pytest.raises(TypeError, match="Convert it with to"):
        stager.get(torch.zeros(3, dtype=torch.float8_e4m3fnuz))


def test_batches_are_prefetched_and_results_drained(stager: xferlib.Stager, torch: Any) -> None:
    batches = ({"image": VALUES + step, "step": step} for step in range(4))
    results = xferlib.stream_map(lambda batch: batch["image"].sum(), batches, stager)
    with results:
        assert [float(result) for result in results] == [float((VALUES + step).sum()) for step in range(4)]
    assert results.bill.pinned_nbytes == 4 * 4
