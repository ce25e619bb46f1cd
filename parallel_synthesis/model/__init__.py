"""Frozen backbone, tokenised rows, branch caches, cache mapper, synthesizer LoRA and the loss."""
