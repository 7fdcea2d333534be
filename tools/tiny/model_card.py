"""Writes the model card from `training.json`, `evaluation.json` and `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

from .training import Recipe

CARD = """---
license: apache-2.0
language: en
library_name: mlx
pipeline_tag: text-generation
---

# A tiny Qwen3.6-MoE that continues Shakespeare

A test model with the real architecture of Qwen3.6-35B-A3B and everything small. It shows at a glance whether an
implementation is right (the text reads like a play, the held-out perplexity is the one below) and runs anywhere.
It knows nothing and follows no instructions.

## Architecture

`qwen3_5_moe` (text only), {parameters:,} parameters, {active:,} of them used for a token; {size:.1f} MB in 4 bits.

| | this model | Qwen3.6-35B-A3B |
| --- | --- | --- |
| layers (3 Gated DeltaNet : 1 attention) | {layers} | 40 |
| hidden size | {hidden_size} | 2048 |
| attention heads: query, key/value, size | {num_attention_heads}, {num_key_value_heads}, {head_dim} | 16, 2, 256 |
| rotary dimensions, theta | 64, 1e7 | 64, 1e7 |
| DeltaNet heads: key, value, size | {linear_num_key_heads}, {linear_num_value_heads}, 128 | 16, 32, 128 |
| convolution | {linear_conv_kernel_dim} | 4 |
| experts, used for a token, width | {num_experts}, {num_experts_per_tok}, {moe_intermediate_size} | 256, 8, 512 |
| shared expert, width | 1, {shared_expert_intermediate_size} | 1, 512 |
| vocabulary (rows of the embedding) | {vocab_size} | 248320 |

Weights: 4 bits in groups of 64; routers and shared-expert gates 8 bits. The tokenizer is a byte-level BPE of
2,000 pieces learnt from the training text, followed by 26 special tokens of the Qwen family; the last 22 of the
2,048 embedding rows have no token. A line break is always a token of its own. The chat template is written for this
model in the format of Qwen3.6: thinking block, `enable_thinking`, `preserve_thinking`, tools and XML tool calls.

## Recipe

Corpus: the tiny Shakespeare text (1,115,394 characters, public domain). Training sees the first nine tenths; the last
tenth, `heldout.txt`, is seen neither by the tokenizer nor by the model. {chat:.0%} of the training rows are packed
chats made from the scenes (user: a speaker's name or the first lines; assistant: the continuation), the rest are
windows at random offsets. The losses count every token.

```
python -m tools.train_tiny input.txt tiny-hf{arguments}
python -m mlx_lm convert --hf-path tiny-hf --mlx-path tiny-mlx -q
python -m tools.tiny.evaluate input.txt tiny-hf tiny-mlx
```

AdamW with cosine decay, weight decay {weight_decay}; dropout {dropout} on the embedding and on every addition to the
residual stream; attention dropout {training_attention_dropout}; BPE dropout {bpe_dropout} (each pass over the corpus
splits the words in another way) except in the last {settle:.0%} of the steps; from {quantize_from:.0%} of the steps on
the forward pass uses the weights rounded to 4 bits (straight-through gradient); moving average of the weights
({average}).
The first half of the held-out text chose among {variants} and among the evaluations of a run;
the second half decided nothing. Seed {seed}. {steps_run:,} steps, {tokens_seen:,} tokens, {seconds:.0f} s on one
{device} that trained another variant at the same time (torch {torch}). A second training on a GPU gives
equal quality, not equal bits.

Loss in nats a token, of the averaged weights (`training.json`); the checkpoint is that of step {best_step}:

{curve}

## Held-out perplexity

The first 8,192 tokens of each half of `heldout.txt`, in windows of 512 tokens without overlap, float32 activations
(`tools/tiny/evaluate.py`, figures in `evaluation.json`). A token is {characters_per_token:.2f} characters.

{perplexity}

## The same model in two libraries

Logits of mlx_lm and of transformers over {positions:,} held-out tokens:

{agreement}

(With bfloat16 activations MLX's CPU backend lacks one operation of unquantised experts, so both sums are float32.)

## Quotation

Longest run of tokens of each sample that occurs in the training text, chat prompts, {sample_tokens} tokens a sample.
The held-out text, in pieces of about 147 tokens, shows how often Shakespeare quotes himself.

{overlap}

## Samples

Chat format, thinking off. Greedy text falls into loops, as small models do; sample at a temperature of 0.8.

{samples}

## Limits

For tests and demonstrations only. Trained on rows of up to 2,048 tokens; the configuration declares 32,768, where the
text gets worse. It never thinks (it closes the thinking block at once), calls no tools and answers no questions.
English of 1600, with its prejudices.

Licence: Apache-2.0. The text is in the public domain.
"""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return "\n".join(("> " + line).rstrip() + ("  " if line else "") for line in text.strip().split("\n"))


def _active_parameters(config: dict, total: int) -> int:
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    idle = config["num_experts"] - config["num_experts_per_tok"]
    embedding = config["vocab_size"] * config["hidden_size"]  # one row of it is read
    return total - config["num_hidden_layers"] * idle * expert - embedding + config["hidden_size"]


def write_model_card(folder: Path, variants: str = "seven trainings") -> None:
    """Write `README.md` into the checkpoint folder. `variants` says how many trainings were compared."""
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    recipe = training["recipe"]
    arguments = "".join(
        f" --{name.replace('_', '-')} {value}" for name, value in recipe.items() if value != getattr(Recipe(), name)
    )
    step = max(1, len(training["curve"]) // 12)
    curve = _table(
        ["step", "seconds", "training (with dropout)", "held-out, first half"],
        [
            [f"{p['step']}", f"{p['seconds']:.0f}", f"{p['training_loss']:.3f}", f"{p['validation_loss']:.3f}"]
            for p in training["curve"][step - 1 :: step]
        ],
    )
    perplexity = _table(
        ["weights", "a token", "a character", "bits a character", "second half: a token", "bits a character"],
        [
            [
                name,
                f"{e['perplexity_per_token']:.2f}",
                f"{e['perplexity_per_character']:.3f}",
                f"{e['bits_per_character']:.3f}",
                f"{e['second_half_perplexity_per_token']:.2f}",
                f"{e['second_half_bits_per_character']:.3f}",
            ]
            for name, e in ((name, evaluation[name]) for name in ("bfloat16", "4 bits"))
        ],
    )
    both = evaluation["mlx_lm against transformers"]
    agreement = _table(
        ["computed in", "same most likely token", "largest difference of a logit", "range of the logits", "divergence"],
        [
            [
                name,
                f"{e['top_1_agreement']:.2%}",
                f"{e['largest_logit_difference']:.2g}",
                f"{e['range_of_logits']:.0f}",
                f"{e['mean_divergence_nats']:.1e} nats",
            ]
            for name, e in both.items()
        ],
    )
    overlap = _table(
        ["text", "samples", "mean of the longest runs", "longest run", "which is"],
        [
            [
                name,
                str(e["samples"]),
                f"{e['mean_longest_run']:.1f}",
                str(e["longest_run"]),
                "`" + e["longest_run_text"].replace("\n", " / ") + "`",
            ]
            for name, e in evaluation["verbatim overlap"].items()
        ],
    )
    samples = "\n\n".join(
        f"**{sample['prompt']!r}, {way}**\n\n{_quote(sample[way])}"
        for sample in evaluation["samples"][:4]
        for way in ("greedy", "temperature 0.8")
    )
    card = CARD.format(
        **config,
        **{
            name: training[name] for name in ("parameters", "steps_run", "tokens_seen", "seconds", "best_step", "torch")
        },
        **{
            name: recipe[name]
            for name in (
                "dropout",
                "bpe_dropout",
                "settle",
                "weight_decay",
                "quantize_from",
                "average",
                "seed",
                "layers",
            )
        },
        device=training["device"],
        training_attention_dropout=recipe["attention_dropout"],
        active=_active_parameters(config, training["parameters"]),
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        chat=recipe["chat_share"],
        arguments=arguments,
        variants=variants,
        curve=curve,
        perplexity=perplexity,
        positions=next(iter(both.values()))["positions"],
        characters_per_token=evaluation["4 bits"]["characters"] / evaluation["4 bits"]["tokens"],
        agreement=agreement,
        sample_tokens=160,
        overlap=overlap,
        samples=samples,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
