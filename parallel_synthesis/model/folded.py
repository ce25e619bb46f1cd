"""Whether a model with a LoRA folded in answers as the backbone with the adapter does, PEFT being the reference."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM

from parallel_synthesis.model.backbone import resolve_device
from parallel_synthesis.model.lanes import quiet_attach, quiet_loading

_SHAPE = (2, 48)  # sequences, tokens: enough for every position effect of a weight


@torch.no_grad()
def logit_difference(base: Path, checkpoint: Path, folded: Path, *, scale: float, rows: int | None) -> float:
    """Norm of the difference of all logits, relative to the norm of the logits, on seeded random tokens.

    rows: of the adapter's embeddings when it holds any: the backbone is resized to them before it is attached. The
    two models are loaded one after the other, in the base's dtype.
    """
    device = resolve_device("auto")
    with quiet_loading(), quiet_attach():
        model = _load(base, device)
        known = min(int(model.get_input_embeddings().weight.shape[0]), rows or 1 << 62)
        if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                model.resize_token_embeddings(rows, mean_resizing=False)
        attached = PeftModel.from_pretrained(model, str(checkpoint / "judger_lora"))
        for module in attached.modules():
            if isinstance(module, LoraLayer):
                module.scaling = {name: value * scale for name, value in module.scaling.items()}
        ids = torch.randint(0, known, _SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
        wanted = _logits(attached.eval(), ids, known)
        del attached, model, module
        gc.collect()
        found = _logits(_load(folded, device), ids, known)
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _load(directory: Path, device: torch.device) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
    return model.to(device).eval()


def _logits(model: Any, ids: Tensor, rows: int) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[..., :rows].float().cpu()
