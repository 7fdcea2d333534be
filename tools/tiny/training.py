"""Training loop of the bundled checkpoint."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from .corpus import Batches, Corpus
from .quantization import QuantizedTraining


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the corpus. Printed into the model card."""

    seed: int = 1
    layers: int = 4
    steps: int = 2000
    warmup: int = 50
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    dropout: float = 0.2
    attention_dropout: float = 0.1
    bpe_dropout: float = 0.1
    settle: float = 0.2
    """Last share of the steps without BPE dropout."""
    quantize_from: float = 0.6
    """Share of the steps after which the weights are quantised in the forward pass."""
    chat_share: float = 0.3
    router_loss: float = 0.01
    average: float = 0.99
    """Decay of the moving average of the weights that is evaluated and saved."""
    evaluate_every: int = 100
    batch_divisor: int = 1
    """Divides the rows of a batch; for a trial on a small machine."""


def _dense_experts(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """All experts for all rows, weighted by zero where not chosen: for 16 small experts faster than sorting rows."""
    weights = hidden.new_zeros(hidden.shape[0], self.num_experts, dtype=scores.dtype)
    weights = weights.scatter(1, chosen, scores)
    rows = hidden.expand(self.num_experts, -1, -1)
    gate, up = torch.bmm(rows, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    inner = self.act_fn(gate) * up * weights.t().unsqueeze(-1).to(up.dtype)
    return torch.einsum("eti,ehi->th", inner, self.down_proj)


def use_dense_experts(model: torch.nn.Module) -> None:
    """Replace the computation of the experts, not its result."""
    for module in model.modules():
        if isinstance(module, Qwen3_5MoeExperts):
            module.forward = _dense_experts.__get__(module)


def build_model(config: Qwen3_5MoeTextConfig, recipe: Recipe, device: str) -> Qwen3_5MoeForCausalLM:
    """The model in float32 with dropout on the embedding and on every addition to the residual stream."""
    torch.manual_seed(recipe.seed)
    config = copy.deepcopy(config)
    config.attention_dropout = recipe.attention_dropout
    model = Qwen3_5MoeForCausalLM(config).float()

    def drop(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if not model.training:
            return output
        if isinstance(output, tuple):
            return (functional.dropout(output[0], recipe.dropout), *output[1:])
        return functional.dropout(output, recipe.dropout)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        mixer = layer.linear_attn if layer.block_type == "linear_attention" else layer.self_attn
        mixer.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    use_dense_experts(model)
    # The output projections of a deep residual stream start smaller.
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")):
            parameter.data /= math.sqrt(2 * recipe.layers)
    return model.to(device)


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


@torch.no_grad()
def mean_loss(model: Qwen3_5MoeForCausalLM, ids: np.ndarray, device: str, window: int = 512) -> float:
    """Nats a token over non-overlapping windows (the first token of each is not predicted)."""
    model.eval()
    count = (len(ids) - 1) // window
    inputs = torch.from_numpy(ids[: count * window].reshape(count, window)).to(device)
    targets = torch.from_numpy(ids[1 : count * window + 1].reshape(count, window)).to(device)
    total = 0.0
    for x, y in zip(inputs.split(32), targets.split(32), strict=True):
        with _autocast(device):
            logits = model(x, use_cache=False).logits
        total += functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum").item()
    model.train()
    return total / targets.numel()


def train(
    model: Qwen3_5MoeForCausalLM, corpus: Corpus, validation: np.ndarray, recipe: Recipe, device: str, minutes: float
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, Any]]:
    """Train; return the averaged weights with the least validation loss, the curve and a summary.

    The schedule ends after `recipe.steps` steps, or earlier when `minutes` are used up: its progress is the larger
    of the two shares, so a slow machine sees a shorter but complete schedule.
    """
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=device != "cpu")
    quantized = QuantizedTraining(model)
    parameters = [p.data for p in model.parameters()]
    average = [p.clone() for p in parameters]
    batches = Batches(
        corpus, recipe.seed, recipe.steps, recipe.bpe_dropout, recipe.settle, recipe.chat_share, recipe.batch_divisor
    )
    best: dict[str, torch.Tensor] = {}
    best_loss, best_step = math.inf, 0
    curve: list[dict[str, float]] = []
    running, seen, progress, step = 0.0, 0, 0.0, 0

    def evaluate() -> float:
        current = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, average)
        if progress > recipe.quantize_from:
            quantized.enter()
        loss = mean_loss(model, validation, device)
        if progress > recipe.quantize_from:
            quantized.leave()
        torch._foreach_copy_(parameters, current)
        return loss

    model.train()
    start = time.perf_counter()
    while progress < 1.0:
        progress = max((step + 1) / recipe.steps, (time.perf_counter() - start) / (60 * minutes))
        batches.progress.value = progress
        rate = recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup)
        rate *= 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(batches.next()).to(device)
        seen += batch.numel()
        straight_through = progress > recipe.quantize_from
        if straight_through:
            quantized.enter()
        with _autocast(device):
            output = model(batch[:, :-1], use_cache=False, output_router_logits=True)
        loss = functional.cross_entropy(output.logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        (loss + recipe.router_loss * output.aux_loss).backward()
        if straight_through:
            quantized.leave()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, parameters, 1.0 - min(recipe.average, (step + 1) / (step + 10)))
        running += loss.detach()
        step += 1
        if step % recipe.evaluate_every == 0 or progress >= 1.0:
            since = step % recipe.evaluate_every or recipe.evaluate_every
            point = {
                "step": step,
                "seconds": round(time.perf_counter() - start, 1),
                "training_loss": round(float(running) / since, 4),
                "validation_loss": round(evaluate(), 4),
            }
            running = 0.0
            curve.append(point)
            print(point, flush=True)
            # A checkpoint that has not met quantisation yet is no candidate.
            allowed = progress > recipe.quantize_from or recipe.quantize_from >= 1.0
            if allowed and point["validation_loss"] < best_loss:
                best_loss, best_step = point["validation_loss"], step
                names = [name for name, _ in model.named_parameters()]
                best = {name: value.to("cpu", copy=True) for name, value in zip(names, average, strict=True)}
    batches.close()
    summary = {
        "recipe": asdict(recipe),
        "steps_run": step,
        "best_step": best_step,
        "tokens_seen": seen,
        "best_validation_loss": best_loss,
        "seconds": round(time.perf_counter() - start, 1),
    }
    return best, curve, summary
