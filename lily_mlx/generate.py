"""Command `lily_mlx.generate`: the flags and the output of `mlx_lm.generate`.

The module has the functions `generate` and `stream_generate` too, as mlx_lm's module of the same name does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.api import generate, load, require_unicode, stream_generate
from lily_mlx.metal import KernelError, current_backend, use_backend

__all__ = ["generate", "main", "stream_generate"]

PROGRAM = "lily_mlx.generate"

# mlx_lm's flags that this version does not act on: given a value, they are refused.
_REFUSED: dict[str, tuple[str, Any]] = {
    "adapter_path": ("--adapter-path", None),
    "image": ("--image", ()),
    "use_default_chat_template": ("--use-default-chat-template", False),
    "max_kv_size": ("--max-kv-size", None),
    "prompt_cache_file": ("--prompt-cache-file", None),
    "quantize_activations": ("--quantize-activations", False),
    "kv_bits": ("--kv-bits", None),
    "draft_model": ("--draft-model", None),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags: all of mlx_lm's, and `--backend`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Generate text with lily_mlx's kernels")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add(
        "--backend",
        choices=("metal", "cuda", "cpu"),
        help="where kernels run; the default is this machine's GPU",
    )
    add("--prompt", "-p", default="hello", help="the message to the model; '-' reads it from stdin")
    add("--system-prompt", help="system message of the chat template")
    add("--prefill-response", help="the beginning of the answer")
    add("--ignore-chat-template", action="store_true", help="give the prompt to the model as it is")
    add("--chat-template-config", help="JSON object of options for the chat template")
    add("--max-tokens", "-m", type=int, default=100, help="tokens to generate, -1 for no limit (default: 100)")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens, or their ids, that end the text")
    add("--temp", type=float, default=0.0, help="temperature of sampling; 0 takes the most likely token")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens with this total probability",
    )
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this part of the best one")
    add("--top-k", type=int, default=0, help="sample from this many tokens; 0 for all")
    add("--xtc-probability", type=float, default=0.0, help="how often XTC drops the most likely tokens")
    add("--xtc-threshold", type=float, default=0.1, help="probability above which XTC may drop a token")
    add("--min-tokens-to-keep", type=int, default=1, help="tokens that min-p keeps at least")
    add("--seed", type=int, help="seed of the sampling")
    add("--verbose", type=_truth, default=True, metavar="BOOL", help="False prints only the text")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at once (default: 2048)")
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer")
    refused = parser.add_argument_group("flags of mlx_lm that are not supported yet")
    add = refused.add_argument
    add("--adapter-path", help="not supported")
    add("--image", nargs="+", default=(), help="not supported")
    add("--use-default-chat-template", action="store_true", help="not supported")
    add("--max-kv-size", type=int, help="not supported")
    add("--prompt-cache-file", help="not supported")
    add("--quantize-activations", "-qa", action="store_true", help="not supported")
    add("--kv-bits", type=int, help="not supported")
    add("--kv-group-size", type=int, default=64, help="no effect without --kv-bits")
    add("--quantized-kv-start", type=int, default=5000, help="no effect without --kv-bits")
    add("--draft-model", help="not supported")
    add("--num-draft-tokens", type=int, default=3, help="no effect without --draft-model")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    for name, (flag, default) in _REFUSED.items():
        if getattr(args, name) != default:
            parser.error(f"{flag} is not supported by lily_mlx yet; leave it out, or use mlx_lm.generate")
    try:
        with use_backend(args.backend) if args.backend else contextlib.nullcontext():
            _run(args)
    except (ValueError, OSError, KernelError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(1)


def _run(args: argparse.Namespace) -> None:
    backend = current_backend()  # an unknown backend is reported before the model is read
    prompt = read_prompt(args.prompt)
    template_options = _json_object(args.chat_template_config)
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer = load(_model_path(args.model, backend), {"trust_remote_code": args.trust_remote_code})
    add_eos_tokens(tokenizer, args.extra_eos_token)

    use_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_template:
        prompt = _apply_template(tokenizer, prompt, args, template_options)
    tokens = tokenizer.encode(prompt, add_special_tokens=not use_template)
    text = generate(
        model,
        tokenizer,
        tokens,
        verbose=args.verbose,
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        **_sampling_options(args, tokenizer, model.config.vocab_size),
    )
    if not args.verbose:
        print(text)


def read_prompt(argument: str) -> str:
    r"""The prompt: the argument with `\n` and `\t` made newline and tab, or all of stdin if that is '-'.

    Raises:
        ValueError: the prompt is not UTF-8.
    """
    prompt = argument.replace("\\n", "\n").replace("\\t", "\t")
    if prompt != "-":
        require_unicode(prompt)
        return prompt
    data = sys.stdin.buffer.read()
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt on stdin is not valid UTF-8 at byte {error.start}: convert it, for example with iconv"
        ) from error


def add_eos_tokens(tokenizer: Any, names: list[str] | tuple[str, ...]) -> None:
    """Adds tokens, by text or id, to those that end the text.

    Raises:
        ValueError: a name that is no token.
    """
    vocabulary = tokenizer.get_vocab()
    for name in names:
        if name not in vocabulary and not (name.isdecimal() and int(name) < len(tokenizer)):
            raise ValueError(f"--extra-eos-token {name!r} is not a token of this model")
        tokenizer.add_eos_token(name)


def _model_path(model: str | None, backend: str) -> str | Path:
    if model is not None:
        return model
    from lily_mlx.checkpoints import bundled_checkpoint

    path = bundled_checkpoint()
    print(f"No --model given: using the tiny bundled checkpoint on the {backend} backend.", file=sys.stderr)
    return path


def _apply_template(tokenizer: Any, prompt: str, args: argparse.Namespace, template_options: dict[str, Any]) -> str:
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    messages.append({"role": "user", "content": prompt})
    prefill = args.prefill_response is not None
    if prefill:
        messages.append({"role": "assistant", "content": args.prefill_response})
    text: str = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        continue_final_message=prefill,
        add_generation_prompt=not prefill,
        **template_options,
    )
    return text


def _sampling_options(args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Sampling inside the kernels where they can do it, else mlx_lm's sampler."""
    top_k = args.top_k if args.top_k < vocab_size else 0
    filters = 0 < args.top_p < 1 or args.min_p or top_k > 0 or args.xtc_probability > 0
    if args.temp == 0 or not filters:
        return {"temp": args.temp, "seed": args.seed}
    from mlx_lm.sample_utils import make_sampler

    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    return {"sampler": sampler}


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--chat-template-config {text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--chat-template-config {text!r} is not a JSON object")
    return value


def _truth(text: str) -> bool:
    return text.lower() not in ("false", "f")


if __name__ == "__main__":
    main()
