"""`accelerate`: mlx_lm's model object, its calls computed by the kernels. `CallableModel`: ours, callable like it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from lily_mlx.doctor.selftest import replace_failing_kernels
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.model import Model, is_supported_family
from lily_mlx.model.checkpoint import OnPacked
from lily_mlx.model.tensors import canonical_name

from .forward import forward, make_cache

logger = logging.getLogger("lily_mlx")


def accelerate(model: nn.Module) -> nn.Module:
    """See `lily_mlx.accelerate`."""
    if isinstance(model, (AcceleratedModel, CallableModel)):
        return model
    reason = _why_not(model)
    if reason is None:
        try:
            return _accelerated(model)
        except ValueError as error:
            reason = str(error)
    logger.warning("this model runs on mlx_lm's own path: %s", reason)
    return model


class AcceleratedModel(nn.Module):  # type: ignore[misc]
    """Mixed into the class of a model of mlx_lm; the rest of the class stays."""

    lily_model: Model

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: Any = None) -> mx.array:
        """Logits float32 [B, L, V] of tokens [B, L]; see `lily_mlx.accelerate.forward.forward`."""
        if input_embeddings is not None:
            raise ValueError(
                "input_embeddings are not supported by an accelerated model; use the model that mlx_lm loaded"
            )
        if self.training:  # the kernels have no gradients
            logits: mx.array = super().__call__(inputs, cache=cache)
            return logits
        return forward(self.lily_model, inputs, cache)

    def make_cache(self) -> list[Any]:
        """Empty caches, one for each layer, for any number of sequences."""
        return make_cache(self.lily_model.config)

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        """Raises ValueError: the kernels have their own arrangement of the weights."""
        raise ValueError("an accelerated model cannot change its weights: change them first, then accelerate")

    def shard(self, group: Any = None) -> None:
        """Raises ValueError: the kernels run on one device."""
        raise ValueError("an accelerated model runs on one device; shard the model that mlx_lm loaded")


@dataclasses.dataclass(frozen=True, eq=False)
class CallableModel(Model):
    """A model of this package with the calls that mlx_lm makes."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: Any = None) -> mx.array:
        """Logits float32 [B, L, V] of tokens [B, L]; see `lily_mlx.accelerate.forward.forward`."""
        if input_embeddings is not None:
            raise ValueError("input_embeddings are not supported by lily_mlx; use mlx_lm.load")
        return forward(self, inputs, cache)

    def make_cache(self) -> list[Any]:
        """Empty caches, one for each layer, for any number of sequences."""
        return make_cache(self.config)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The weights of the layers."""
        return self.weights.layers

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def args(self) -> SimpleNamespace:
        """Names that tools of mlx_lm read."""
        config = self.config
        return SimpleNamespace(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied,
        )


def lily_model_of(model: Any) -> Model | None:
    """The model of this package behind a model object, if there is one."""
    if isinstance(model, Model):
        return model
    return model.lily_model if isinstance(model, AcceleratedModel) else None


def from_mlx_lm(model: nn.Module) -> Model:
    """The weights of a model that mlx_lm loaded, for the kernels.

    The kernels have all parts of a weight in one array. The model's modules get views of it in the place of their own
    arrays, with the same values, so that the large weights are in memory once.

    Raises:
        ValueError: the kernels do not run it; the message says why.
    """
    reason = _why_not(model)
    if reason is not None:
        raise ValueError(reason)
    return CallableModel.from_arrays(_settings(model), _arrays(model), _share_arrays(model))


def _accelerated(model: nn.Module) -> nn.Module:
    replace_failing_kernels()
    base = type(model)
    kind = type(f"Accelerated{base.__name__}", (AcceleratedModel, base), {"__module__": base.__module__})
    lily_model = from_mlx_lm(model)
    accelerated: Any = kind.__new__(kind)  # type: ignore[call-overload]
    dict.update(accelerated, model)
    accelerated.__dict__.update(model.__dict__)
    accelerated.lily_model = lily_model
    return accelerated


def _why_not(model: nn.Module) -> str | None:
    model_type = getattr(model, "model_type", None)
    if not isinstance(model, nn.Module) or not is_supported_family({"model_type": model_type}):
        return f"{type(model).__name__} of model_type {model_type!r} is of another family than Qwen3.5 to Qwen3-Next"
    if any(getattr(module, "sharding_group", None) is not None for module in model.modules()):
        return "it is sharded over several devices"
    if any(isinstance(module, nn.QQLinear) for module in model.modules()):
        return "it quantises activations, which the kernels do not"
    return None


def _settings(model: Any) -> dict[str, Any]:
    """What `config.json` says, from the arguments that mlx_lm made of it."""
    arguments = getattr(model.args, "text_config", None) or dataclasses.asdict(model.args)
    settings: dict[str, Any] = {"model_type": model.model_type, "text_config": dict(arguments)}
    named = {name: module for name, module in model.named_modules() if hasattr(module, "bits")}
    encodings = {name: {"bits": module.bits, "group_size": module.group_size} for name, module in named.items()}
    if encodings:
        modes = {getattr(module, "mode", "affine") for module in named.values()}
        mode = "affine" if modes == {"affine"} else "+".join(sorted(modes))
        # Each weight has an entry of its own, so the default is that of none.
        settings["quantization"] = {**next(iter(encodings.values())), "mode": mode, **encodings}
    return settings


def _share_arrays(model: nn.Module) -> OnPacked:
    """A function that replaces the arrays of the module of a packed weight by views of that weight."""
    modules = {canonical_name(name): module for name, module in model.named_modules()}

    def share(path: str, weight: QuantizedWeight) -> None:
        module = modules[path]
        for name, view in weight.arrays.items():
            own = module.get(name)
            # An adapter's module has none, and float16 scales were rounded for the kernels.
            if isinstance(own, mx.array) and (own.dtype, own.shape) == (view.dtype, view.shape):
                mx.eval(view)
                module[name] = view

    return share


def _arrays(model: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """The model's tensors, adapters fused; holds none of them once it is at its end."""
    arrays = dict(tree_flatten(model.parameters()))
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "fuse")]
    for name, module in adapted:
        prefix = f"{name}."
        for key in [key for key in arrays if key.startswith(prefix)]:
            del arrays[key]
        arrays |= {prefix + key: array for key, array in tree_flatten(module.fuse().parameters())}
    if adapted:
        logger.warning(
            "LoRA adapters of %d layers are fused into the weights, which rounds them to the weights' bits as "
            "mlx_lm.fuse does",
            len(adapted),
        )
    yield from arrays.items()


def callable_model(model: Any) -> Any:
    """The same model, with the calls that mlx_lm makes."""
    if isinstance(model, Model) and not isinstance(model, CallableModel):
        return CallableModel(model.config, model.weights)
    return model
