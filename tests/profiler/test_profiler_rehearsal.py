"""A rehearsed step's end: whatever the optimizer does, the parameters are those from before."""

import pytest
import torch
from torch import nn

from lengthwise.comm import SoloTransport
from lengthwise.config.schema import OptimizerConfig
from lengthwise.engine.optimizer import ShardedAdamW
from lengthwise.engine.replicated import FlatParameters
from lengthwise.profiler.rehearsal import RehearsedParameters
from lengthwise.profiler.watch import Stopwatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", [1.0, float("nan")])
def test_no_update_reaches_the_parameters(dtype, gradient):
    transport = SoloTransport()
    parameters = FlatParameters(nn.Linear(5, 3), transport, dtype=dtype)
    before = [each.clone() for each in (parameters.values, parameters.master_weights)]
    rehearsed = RehearsedParameters(parameters, Stopwatch("wall", transport, torch.device("cpu")))
    optimizer = ShardedAdamW(rehearsed, OptimizerConfig(weight_decay=0.5), transport)
    for shard in rehearsed.shards():
        shard.weights.fill_(gradient)
    parameters.grads.fill_(gradient)
    optimizer.update(1.0, optimizer.reduce())
    for old, new in zip(before, (parameters.values, parameters.master_weights), strict=True):
        assert torch.equal(old, new)
    assert not parameters.grads.any()
    assert rehearsed.moved_seconds > 0
