"""The step: the ordered mean of the ranks' gradients, an untouched backbone, one transfer's figures."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from parallel_synthesis.config import BackboneConfig, LoraConfig, MapperConfig
from parallel_synthesis.model.backbone import load_backbone
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import BranchTokens, RowTokens
from parallel_synthesis.training.ranks import Processes, World
from parallel_synthesis.training.rng import RankStreams
from parallel_synthesis.training.step import Stepper

CPU = torch.device("cpu")
RANKS = 4


def row(rng: random.Random) -> RowTokens:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(300) for _ in range(count))

    branches = tuple(BranchTokens(ids=ids(rng.randint(3, 9)), kept=3) for _ in range(rng.randint(1, 3)))
    return RowTokens(branches=branches, live=ids(12), target_start=12 - rng.randint(2, 6))


@pytest.fixture
def parts(tiny_backbone: Path) -> tuple[Synthesizer, Stepper, list[tuple[str, torch.nn.Parameter]]]:
    backbone = load_backbone(BackboneConfig(model=str(tiny_backbone)), device="cpu")
    synthesizer = Synthesizer(backbone, mapper=MapperConfig(), lora=LoraConfig(r=2, alpha=4), seed=0)
    parameters = synthesizer.parameters("both")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a fresh B is zero, which would hide half of the gradient
        for _, parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-2, weight_decay=0.0)
    processes = Processes(World(index=0, size=1, local_index=0), ranks=RANKS, device=CPU)
    streams = RankStreams(processes.mine, seed=0, device=CPU)
    return synthesizer, Stepper(synthesizer, parameters, optimizer, processes, streams), list(parameters)


def plain_gradients(
    synthesizer: Synthesizer, parameters: Sequence[tuple[str, torch.nn.Parameter]], rows: Sequence[RowTokens]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, flat gradient) of one rank by torch.autograd alone: mean over all target tokens of the batch."""
    total = sum(item.target_tokens for item in rows)
    loss = torch.stack([synthesizer.loss(item, train=False)[0] for item in rows]).sum() / total
    grads = torch.autograd.grad(loss, [parameter for _, parameter in parameters])
    return loss.detach(), torch.cat([grad.flatten() for grad in grads])


def test_the_gradient_is_the_ordered_mean_of_the_rank_means(
    parts: tuple[Synthesizer, Stepper, list[tuple[str, torch.nn.Parameter]]],
) -> None:
    synthesizer, stepper, parameters = parts
    rng = random.Random(0)
    batches = {rank: [row(rng) for _ in range(2)] for rank in range(RANKS)}
    plain = [plain_gradients(synthesizer, parameters, batches[rank]) for rank in range(RANKS)]
    outcome = stepper.compute(batches)
    assert outcome.losses == pytest.approx([float(loss) for loss, _ in plain], rel=1e-5)
    stepper.update()
    expected = (((plain[0][1] + plain[1][1]) + plain[2][1]) + plain[3][1]) / RANKS
    reduced = stepper._total
    assert torch.allclose(reduced, expected, rtol=1e-4, atol=1e-7)
    assert outcome.norm == pytest.approx(float(expected.norm()), rel=1e-4)
    # The order of the additions is fixed: the sum of the ranks' own bits, in this order, to the last bit.
    own = [stepper._flat[rank][:-1] for rank in range(RANKS)]
    assert torch.equal(reduced, (((own[0] + own[1]) + own[2]) + own[3]) / RANKS)


def test_loss_bits_are_those_of_the_loss(
    parts: tuple[Synthesizer, Stepper, list[tuple[str, torch.nn.Parameter]]],
) -> None:
    _, stepper, _ = parts
    rng = random.Random(1)
    outcome = stepper.compute({rank: [row(rng)] for rank in range(RANKS)})
    for loss, bits in zip(outcome.losses, outcome.loss_bits, strict=True):
        assert struct.pack(">f", loss).hex() == bits
    assert all(outcome.finite)


def test_training_leaves_every_bit_of_the_backbone(
    parts: tuple[Synthesizer, Stepper, list[tuple[str, torch.nn.Parameter]]],
) -> None:
    synthesizer, stepper, parameters = parts
    model = synthesizer.backbone.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name: parameter.detach().clone() for name, parameter in parameters}
    rng = random.Random(2)
    for _ in range(3):
        stepper.compute({rank: [row(rng)] for rank in range(RANKS)})
        stepper.update()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not torch.equal(trained[name], parameter) for name, parameter in parameters)


def test_a_gradient_that_overflows_only_in_the_sum_is_not_finite(
    parts: tuple[Synthesizer, Stepper, list[tuple[str, torch.nn.Parameter]]],
) -> None:
    _, stepper, _ = parts
    stepper._flat.fill_(2e38)  # finite in fp32; two of them are not
    outcome = stepper._reduce()
    assert all(outcome.finite)
    assert not outcome.norm_finite
