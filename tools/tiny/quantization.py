"""Affine quantisation in groups of 64 as `mx.quantize` defines it, for training with quantised weights."""

from __future__ import annotations

import torch

GROUP = 64


def fake_quantize(groups: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Quantise and dequantise float32 `[n, 64]`, one group a row.

    The value of largest magnitude is kept exactly (it becomes the bias), zero stays zero; scale and bias are
    rounded to bfloat16, in which the converted file holds them.
    """
    levels = float(2**bits - 1)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp_min(1e-7)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    zero = torch.round(edge / scale)
    scale = torch.where(zero != 0, edge / zero, scale)
    bias = torch.where(zero != 0, edge, torch.zeros_like(edge))
    scale, bias = scale.bfloat16().float(), bias.bfloat16().float()
    return torch.round((groups - bias) / scale).clamp_(0.0, levels) * scale + bias


class QuantizedTraining:
    """Straight-through estimator: the forward and backward pass see quantised weights, the optimiser the full ones."""

    def __init__(self, model: torch.nn.Module) -> None:
        def is_quantized(name: str, parameter: torch.Tensor) -> bool:
            # Routers get 8 bits, where the error does not matter; convolutions and norms are not quantised.
            router = name.endswith("mlp.gate.weight") or name.endswith("shared_expert_gate.weight")
            return parameter.ndim >= 2 and "conv1d" not in name and not router

        self.parameters = [p for name, p in model.named_parameters() if is_quantized(name, p)]
        self.full: list[torch.Tensor] = []

    @torch.no_grad()
    def enter(self) -> None:
        """Replace the weights by their quantised values."""
        data = [p.data for p in self.parameters]
        self.full = [p.clone() for p in data]
        quantized = fake_quantize(torch.cat([p.reshape(-1, GROUP) for p in data]))
        parts = quantized.split([p.numel() // GROUP for p in data])
        torch._foreach_copy_(data, [part.view_as(p) for part, p in zip(parts, data, strict=True)])

    @torch.no_grad()
    def leave(self) -> None:
        """Put the full weights back (gradients stay)."""
        torch._foreach_copy_([p.data for p in self.parameters], self.full)
        self.full = []
