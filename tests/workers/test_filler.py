"""What fills the slots in a worker, called where it can be seen."""

from __future__ import annotations

import pickle

import numpy as np

from tests.workers import fills
from xferlib.pipeline.workers.layout import Layout
from xferlib.pipeline.workers.messages import Failed, Filled, Order
from xferlib.pipeline.workers.worker import _Filler


def test_an_order_before_its_run_is_a_failure_and_no_batch() -> None:
    layout = Layout((64, np.int64))
    slot = np.zeros(layout.nbytes, np.uint8)
    filler = _Filler(layout, [slot])
    order = Order(0, 0, 0, pickle.dumps(3))
    refused = filler.reply(order)
    assert isinstance(refused, Failed)
    assert "before its run began" in refused.words
    filler.begin(pickle.dumps(fills.number))
    assert filler.reply(order) == Filled(None)
    assert (layout.views(slot) == 3).all()
