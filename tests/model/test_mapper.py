"""The cache mapper on its own: shapes, inputs, identity at the start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_synthesis.config import MapperConfig
from parallel_synthesis.model.mapper import CacheMapper, affine

pytestmark = pytest.mark.lane
INPUTS = {"both": 3, "length": 2, "num_agents": 2, "none": 1}


@pytest.mark.parametrize("features", list(INPUTS))
def test_state_dict_and_identity(features: Any) -> None:
    mapper = CacheMapper(MapperConfig(metadata_features=features))
    shapes = {name: tuple(tensor.shape) for name, tensor in mapper.state_dict().items()}
    assert shapes == {
        "net.0.weight": (32, INPUTS[features]),
        "net.0.bias": (32,),
        "net.2.weight": (4, 32),
        "net.2.bias": (4,),
    }
    identity = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(2, 5, 4)
    assert torch.equal(mapper([7, 3], 5), identity)


@pytest.mark.parametrize("features", list(INPUTS))
def test_inputs_in_order(features: Any) -> None:
    """One hidden unit that passes one input on at a time: which input is where."""
    expected = {
        "length": [math.log1p(7), math.log1p(3)],
        "num_agents": [math.log1p(2), math.log1p(2)],
    }
    names = {"both": ["length", "num_agents"], "none": []}.get(features, [features])
    mapper = CacheMapper(MapperConfig(hidden_dim=1, metadata_features=features))
    with torch.no_grad():
        mapper.net[0].bias.zero_()
        mapper.net[2].weight.fill_(0.1)
        for place in range(INPUTS[features]):
            mapper.net[0].weight.zero_()
            mapper.net[0].weight[0, place] = 1
            got = mapper([7, 3], 5)
            for branch in range(2):
                for layer in range(5):
                    value = expected[names[place]][branch] if place < len(names) else layer / 4
                    change = 0.1 * math.tanh(0.1 * value / (1 + math.exp(-value)))
                    assert got[branch, layer].tolist() == pytest.approx(
                        [1 + change, change, 1 + change, change], abs=1e-6
                    )


def test_a_single_layer_is_layer_zero() -> None:
    assert CacheMapper(MapperConfig())([4], 1).shape == (1, 1, 4)


def test_affine_is_computed_in_fp32_and_keeps_the_dtype() -> None:
    """alpha = 1.001 is 1 in bf16: computed there, training could not move the cache by less than 0.4 %."""
    states = torch.full((1, 1, 2, 2), 100.0, dtype=torch.bfloat16)
    mapped = affine(states, torch.tensor(1.006), torch.tensor(0.02))
    assert mapped.dtype == torch.bfloat16
    assert torch.equal(mapped, torch.full_like(states, 100.62))
    assert torch.equal(affine(states, torch.tensor(1.0), torch.tensor(0.0)), states)
