"""Tensors of a Hugging Face checkpoint in the names, shapes and values of an MLX one.

The rules are those of `sanitize` in mlx_lm's models `qwen3_5`, `qwen3_5_moe` and `qwen3_next`. Nothing is read from
the files here: every change waits until its tensor is used.
"""

from __future__ import annotations

import re

import mlx.core as mx

_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_JOINED = ".mlp.experts.gate_up_proj"
_NORMS = (".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight")
_LAST_NORM = "norm.weight"


def sanitize(arrays: dict[str, mx.array], originals: dict[str, str]) -> None:
    """Changes tensors of a Hugging Face checkpoint into those of an MLX one; an MLX one stays as it is.

    Args:
        arrays: tensors by canonical name.
        originals: their names in the files, for messages; new tensors get one there.

    Raises:
        ValueError: the experts of a layer are not numbered from 0 on, or differ in shape.
    """
    stacked = _stack_experts(arrays, originals)
    convolutions = [name for name, array in arrays.items() if name.endswith("conv1d.weight") and array.shape[-1] != 1]
    for name in convolutions:
        if arrays[name].ndim == 3:
            arrays[name] = arrays[name].moveaxis(2, 1)
    if stacked or convolutions:
        # Hugging Face keeps the factor of these norms minus one.
        for name, array in arrays.items():
            if array.ndim == 1 and (name == _LAST_NORM or name.endswith(_NORMS)):
                arrays[name] = array + 1.0
    for name in [name for name in arrays if name.endswith(_JOINED)]:
        _split_experts(arrays, originals, name.removesuffix(_JOINED))


def _stack_experts(arrays: dict[str, mx.array], originals: dict[str, str]) -> bool:
    """One tensor [E, ...] in place of one for each expert; returns whether there were such."""
    found: dict[str, dict[int, str]] = {}
    for name in arrays:
        match = _EXPERT.fullmatch(name)
        if match:
            found.setdefault(f"{match[1]}.switch_mlp.{match[3]}.weight", {})[int(match[2])] = name
    for target, experts in found.items():
        names = [experts[i] for i in sorted(experts)]
        shapes = {tuple(arrays[name].shape) for name in names}
        if sorted(experts) != list(range(len(experts))) or len(shapes) != 1:
            raise ValueError(
                f"the {len(experts)} experts of {target} are numbered {min(experts)} to {max(experts)} and have the "
                f"shapes {sorted(shapes)}; expected all from 0 on, of one shape. Download the checkpoint again"
            )
        originals[target] = originals[names[0]]
        arrays[target] = mx.stack([arrays.pop(name) for name in names])
    return bool(found)


def _split_experts(arrays: dict[str, mx.array], originals: dict[str, str], layer: str) -> None:
    """Gate and up matrices of their own, in place of one tensor [E, 2 I, H] of both."""
    joined, experts, switch = f"{layer}{_JOINED}", f"{layer}.mlp.experts", f"{layer}.mlp.switch_mlp"
    both = arrays.pop(joined)
    middle = both.shape[-2] // 2
    for part, array in (("gate_proj", both[..., :middle, :]), ("up_proj", both[..., middle:, :])):
        arrays[f"{switch}.{part}.weight"] = array
        originals[f"{switch}.{part}.weight"] = originals[joined]
    if f"{experts}.down_proj" in arrays:
        arrays[f"{switch}.down_proj.weight"] = arrays.pop(f"{experts}.down_proj")
        originals[f"{switch}.down_proj.weight"] = originals[f"{experts}.down_proj"]
