"""Checkpoints that ship inside the package."""

from __future__ import annotations

from pathlib import Path


def bundled_checkpoint() -> Path:
    """Folder of the bundled tiny Qwen3.6-MoE checkpoint (MLX format, 4 bits); its `README.md` is the model card."""
    return Path(__file__).parent / "tiny"


def held_out_text() -> str:
    """The part of the corpus that neither the tokenizer nor the model has seen (111,537 ASCII characters)."""
    return (bundled_checkpoint() / "heldout.txt").read_text(encoding="utf-8")


__all__ = ["bundled_checkpoint", "held_out_text"]
