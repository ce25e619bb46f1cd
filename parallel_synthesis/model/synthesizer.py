"""The synthesizer: cache mapper and LoRA on a frozen backbone, a row's loss, its components' states."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import TaskType, get_peft_model
from torch import Tensor, nn

from parallel_synthesis.config import Components, LoraConfig, MapperConfig, WorkersConfig
from parallel_synthesis.errors import BackboneError, CheckpointError
from parallel_synthesis.model import components as files
from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.branches import (
    BranchCache,
    common_prefix,
    empty_cache,
    join,
    plan_prefill,
    prefill,
)
from parallel_synthesis.model.fit import target_problem, unknown_modules
from parallel_synthesis.model.lanes import quiet_attach, run_base
from parallel_synthesis.model.loss import target_loss
from parallel_synthesis.model.mapper import CacheMapper
from parallel_synthesis.model.tokens import RowTokens
from parallel_synthesis.model.workers import WorkedRow, end_tokens, work

ADAPTER = "default"


class Synthesizer:
    """Reads all branches of a row at once through the joined cache (design.md, "The method, exactly").

    `backbone.model` stays as it is and prefills the branches; the LoRA sits on a second module tree over the
    same parameters. So prefill needs no switching off of the LoRA, and no error can leave it off. All
    trainable weights are fp32 and drawn from `seed` alone; the global RNG is left untouched. `forwards`
    counts backbone forwards.
    """

    def __init__(self, backbone: Backbone, *, mapper: MapperConfig, lora: LoraConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.backbone = backbone
        self.lora_config = lora
        self.mapper_config = mapper
        self.forwards = 0
        # The embeddings of the adapter that was loaded, as its file has them: never trained, only passed on, or
        # left out and only named.
        self._carried: dict[str, Tensor] = {}
        self._embeddings: dict[str, Any] | None = None
        self.peft_model = _add_lora(backbone, lora)
        _draw_lora(self.peft_model, generator)
        self.mapper = CacheMapper(mapper, generator=generator).to(backbone.device)
        model = self.peft_model.get_base_model()
        self._base: nn.Module = model.base_model
        self._head: nn.Module = model.get_output_embeddings()
        self._dropouts = [
            part
            for name, part in model.named_modules()
            if ".lora_dropout." in name and isinstance(part, nn.Dropout)
        ]
        self.train(False)

    def train(self, mode: bool = True) -> None:
        """LoRA dropout on or off. Nothing else of the backbone ever leaves eval mode."""
        for dropout in self._dropouts:
            dropout.train(mode)

    def lora_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """LoRA weights in module order, under the names of the adapter file."""
        found = self.peft_model.named_parameters()
        return [(name.replace(f".{ADAPTER}.", "."), part) for name, part in found if ".lora_" in name]

    def parameters(self, components: Components) -> list[tuple[str, nn.Parameter]]:
        """The weights that `components` trains: the mapper's first, then the LoRA's in module order.

        The order of the optimizer's state in checkpoints (formats.md, "training_state.pt"). Sets
        requires_grad: True for these, False for the other component's.
        """
        mapper = [(f"cache_mapper.{name}", part) for name, part in self.mapper.named_parameters()]
        lora = self.lora_parameters()
        for _, parameter in mapper:
            parameter.requires_grad_(components != "lora_only")
        for _, parameter in lora:
            parameter.requires_grad_(components != "mapper_only")
        return [(name, part) for name, part in (*mapper, *lora) if part.requires_grad]

    def work(
        self, row: RowTokens, workers: WorkersConfig, *, generator: torch.Generator | None = None
    ) -> WorkedRow:
        """The row with the branches that its workers generate, without the LoRA; see model/workers.py."""
        worked = work(self.backbone, row, workers, ends=end_tokens(self.backbone), generator=generator)
        self.forwards += worked.forwards
        return worked

    def loss(self, row: RowTokens, *, with_branches: bool = True, train: bool = True) -> tuple[Tensor, int]:
        """Sum of the target cross-entropy (scalar, fp32, differentiable) and the number of target tokens.

        `train` switches LoRA dropout on, which draws from torch's global RNG; nothing else draws.
        """
        self.train(train)
        hidden = self._live_hidden(row, with_branches=with_branches)
        targets = torch.tensor(row.live[row.target_start :], device=self.backbone.device)
        return target_loss(self._head, hidden[row.target_start - 1 : -1], targets), row.target_tokens

    @torch.no_grad()
    def logits(self, row: RowTokens, *, with_branches: bool = True) -> Tensor:
        """Logits [live, vocabulary] at every live position, without dropout. For checks, not training."""
        self.train(False)
        logits: Tensor = self._head(self._live_hidden(row, with_branches=with_branches))
        return logits

    def _live_hidden(self, row: RowTokens, *, with_branches: bool) -> Tensor:
        """Final hidden states [live, hidden] of the live sequence behind the joined cache."""
        used = with_branches and bool(row.branches)
        offset = row.offset if used else 0
        device = self.backbone.device
        ids = torch.tensor([row.live], device=device)
        positions = torch.arange(offset, offset + len(row.live), device=device)[None]
        cache = self._joined(row) if used else empty_cache(self.backbone.layers)
        self.forwards += 1
        return run_base(self._base, ids, positions, cache)[0]

    def _joined(self, row: RowTokens) -> Any:
        caches = row.caches if isinstance(row, WorkedRow) else self._prefilled(row)
        return join(caches, self.mapper([cache.kept for cache in caches], self.backbone.layers))

    def _prefilled(self, row: RowTokens) -> Sequence[BranchCache]:
        plan = plan_prefill([len(branch.ids) for branch in row.branches], common_prefix(row.branches))
        self.forwards += plan.forwards
        return prefill(self.backbone.base, row.branches, plan)

    def adapter_state(self) -> dict[str, Tensor]:
        """The tensors of adapter_model.safetensors under PEFT's names: fp32 LoRA weights.

        The frozen embeddings are in it when the run resized the vocabulary (nobody else has those rows), and when
        the adapter that was loaded had them and they are carried.
        """
        state = {name: part.detach() for name, part in self.lora_parameters()}
        if self.backbone.resized_from is not None:
            return state | files.embeddings(self.peft_model)
        return state | self._carried

    def embeddings_record(self) -> dict[str, Any]:
        """What a checkpoint's meta says of the embeddings it carries or leaves out: {saved, rows, tensors}; or nothing."""
        return {} if self._embeddings is None else {"embeddings": dict(self._embeddings)}

    def adapter_config(self) -> dict[str, Any]:
        """Content of adapter_config.json as PEFT writes it: plain JSON types, sorted lists."""
        return files.plain_config(self.peft_model.peft_config[ADAPTER])

    def load_components(self, directory: Path, *, carry: bool = True) -> None:
        """Takes over a checkpoint directory's mapper and LoRA. CheckpointError names what does not fit.

        carry: embeddings of its adapter go into `adapter_state`; they must not have been left out of it then.
        """
        left_out = files.left_out(directory)
        if left_out is not None and carry:
            raise CheckpointError(
                f"{directory}: its adapter was saved without its {len(left_out['tensors'])} embeddings; put them "
                f'back by `ps snapshot {directory} --export DEST`, or set checkpoint.embeddings = "drop"'
            )
        mapper = files.read_mapper(directory, self.mapper_config, self.mapper.state_dict())
        lora = files.read_adapter(directory, self.lora_config, self.adapter_state(), self.backbone)
        embeddings = {name: weight for name, weight in lora.items() if files.is_embedding(name)}
        with torch.no_grad():
            self.mapper.load_state_dict(mapper)
            for name, parameter in self.lora_parameters():
                parameter.copy_(lora[name])
            if self.backbone.resized_from is not None:
                for name, weight in files.embeddings(self.peft_model).items():
                    if name in lora:
                        weight[self.backbone.resized_from :] = lora[name][self.backbone.resized_from :]
            elif embeddings:
                self._carried = embeddings if carry else {}
                rows = next(iter(embeddings.values())).shape[0]
                self._embeddings = {"saved": carry, "rows": rows, "tensors": sorted(embeddings)}
            elif left_out is not None:
                self._embeddings = dict(left_out)


def _add_lora(backbone: Backbone, lora: LoraConfig) -> Any:
    """A PEFT model with a new LoRA over the backbone's own parameters; `backbone.model` is not touched."""
    tensors = chain(backbone.model.parameters(), backbone.model.buffers())
    tree = copy.deepcopy(backbone.model, {id(tensor): tensor for tensor in tensors})
    config = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    modules = dict(backbone.model.named_modules())
    unknown = unknown_modules(lora.target_modules, modules)
    try:
        # PEFT takes a list of which it finds but one, and would train less than was asked for.
        if unknown:
            raise ValueError(f"not found: {unknown}")
        # PEFT draws initial weights; they are drawn again in _draw_lora.
        with quiet_attach(), torch.random.fork_rng(devices=devices):
            peft_model = get_peft_model(tree, config)
    except ValueError as error:
        linear = [name for name, part in modules.items() if isinstance(part, nn.Linear)]
        raise BackboneError(target_problem(unknown or lora.target_modules, linear, backbone.name)) from error
    # Set now: PEFT itself fills in the path the weights were loaded from, and warns when it was given another
    # name.
    config.base_model_name_or_path, config.revision = backbone.name, backbone.revision
    return peft_model


def _draw_lora(peft_model: nn.Module, generator: torch.Generator) -> None:
    """A uniform within 1/sqrt(inputs) (PEFT's own range), B zero; in module order, on the CPU, in fp32."""
    for name, parameter in peft_model.named_parameters():
        if ".lora_" not in name:
            continue
        drawn = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            drawn.uniform_(-bound, bound, generator=generator)
        parameter.data = drawn.to(parameter.device)
