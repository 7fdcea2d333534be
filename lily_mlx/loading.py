"""`load` with mlx_lm's signature: models of the family for the kernels, others as mlx_lm loads them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lily_mlx.model import ModelConfig, load_weights, read_config
from lily_mlx.model.config import require_supported_family

logger = logging.getLogger("lily_mlx")


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Loads a model and its tokenizer.

    A model that the kernels do not run is loaded by mlx_lm, after a notice with the reason, and everything in this
    package then uses mlx_lm's own path for it.

    Args:
        path_or_hf_repo: a directory in MLX format, or a Hugging Face repository, which mlx_lm downloads.
        tokenizer_config: keywords for the tokenizer.
        model_config: fields that replace those of `config.json`.
        adapter_path: directory of LoRA adapters, which are fused into the weights.
        lazy: only for models that mlx_lm loads; the kernels' weights are arranged, and so read, at once.
        return_config: return the contents of `config.json` as well.
        revision: branch, tag or commit of the repository.
        trust_remote_code: for models that mlx_lm loads; no model of the family has code of its own.

    Returns:
        (model, tokenizer) or (model, tokenizer, config). The model takes mlx_lm's calls, and the tokenizer is mlx_lm's
        `TokenizerWrapper`.

    Raises:
        FileNotFoundError: the directory or a file in it is missing.
        ValueError: the model is corrupt or not supported by mlx_lm either.
    """
    directory = find_model(path_or_hf_repo, revision)
    config = read_config(directory) | (model_config or {})
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{directory} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
    reason = why_mlx_lm(config)
    if reason is not None:
        logger.warning("this model runs on mlx_lm's own path: %s", reason)
        from mlx_lm import load as mlx_lm_load

        return mlx_lm_load(
            str(directory),
            tokenizer_config,
            model_config,
            adapter_path,
            lazy,
            return_config,
            trust_remote_code=trust_remote_code,
        )

    from mlx_lm.utils import load_tokenizer

    if adapter_path is not None:
        model: Any = _with_adapters(directory, model_config, adapter_path)
    else:
        from .accelerate.model import CallableModel

        model_settings = ModelConfig.from_dict(config)
        model = CallableModel(model_settings, load_weights(directory, model_settings))
    tokenizer = load_tokenizer(directory, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def why_mlx_lm(config: dict[str, Any]) -> str | None:
    """Why the kernels do not run the model of a `config.json`; None if they do."""
    if config.get("quantize_activations"):
        return "quantize_activations rounds the inputs of each layer, which the kernels do not"
    try:
        require_supported_family(config)
        ModelConfig.from_dict(config)
    except ValueError as error:
        return str(error)
    return None


def find_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The local directory of a model; a Hugging Face repository is downloaded if need be.

    Raises:
        FileNotFoundError: there is no such directory, and it is no name of a repository.
    """
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hf_repo)
    if path.exists():
        raise FileNotFoundError(f"{name!r} is a file: give the model's directory")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or "\\" in name or " " in name:
        raise FileNotFoundError(f"{name!r} does not exist, and it is not a Hugging Face name like 'owner/model'")

    from mlx_lm.utils import _download

    try:
        return Path(_download(name, revision=revision))
    except Exception as error:
        raise FileNotFoundError(f"{name!r} is no local directory, and its download failed: {error}") from error


def _with_adapters(directory: Path, model_config: dict[str, Any] | None, adapter_path: str) -> Any:
    from mlx_lm.utils import load_adapters, load_model

    from .accelerate.model import from_mlx_lm

    model, _ = load_model(directory, model_config=model_config)
    model = load_adapters(model, adapter_path)
    model.eval()
    return from_mlx_lm(model)
