"""Command `lily_mlx.generate`: the flags and the output of `mlx_lm.generate`.

The module has the functions `generate` and `stream_generate` too, as mlx_lm's module of the same name does.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx

from lily_mlx import prompt_files
from lily_mlx.api import REFUSED, generate, require_unicode, stream_generate
from lily_mlx.command import (
    add_backend,
    json_object,
    mlx_lm_arguments,
    model_path,
    read_text,
    refuse,
    run,
    run_mlx_lm,
    truth,
)
from lily_mlx.loading import find_model, load, why_mlx_lm
from lily_mlx.model import read_config

__all__ = ["generate", "main", "stream_generate"]

PROGRAM = "lily_mlx.generate"

_FILTERS = ("top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags: all of mlx_lm's, and `--backend`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Generate text with lily_mlx's kernels")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add_backend(parser)
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
    add("--verbose", type=truth, default=True, metavar="BOOL", help="False prints only the text")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at once (default: 2048)")
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer or a model")
    add("--adapter-path", help="directory of LoRA adapters, which are fused into the weights")
    add("--prompt-cache-file", help="file of a processed prompt, which this prompt continues")
    add("--use-default-chat-template", action="store_true", help="needs a tokenizer that has a chat template")
    other = parser.add_argument_group("flags that mlx_lm's own path acts on, with a notice")
    add = other.add_argument
    add("--quantize-activations", "-qa", action="store_true", help="round the inputs of each layer as its weights")
    add("--kv-bits", type=int, help="bits of the keys and values; all are kept as they are without it")
    add("--kv-group-size", type=int, default=64, help="values that share a scale with --kv-bits (default: 64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before --kv-bits takes effect (default: 5000)")
    refused = parser.add_argument_group("flags for models of other families, refused for this one")
    add = refused.add_argument
    add("--image", nargs="+", default=(), help="image files; this family is run as text only")
    add("--max-kv-size", type=int, help="most tokens that attention keeps; this family keeps all")
    add("--draft-model", help="model of speculative decoding, which needs a state that can go back")
    add("--num-draft-tokens", type=int, default=3, help="tokens that --draft-model proposes at once (default: 3)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    run(PROGRAM, make_parser().parse_args(arguments), _run)


def _run(args: argparse.Namespace) -> None:
    cache, name = None, args.model
    tokenizer_config: dict[str, Any] = {}
    if args.prompt_cache_file is not None:
        cache, name, tokenizer_config = prompt_files.load(args.prompt_cache_file, args.model)
    template_options = json_object("--chat-template-config", args.chat_template_config)
    name = model_path(name)
    reason = _why_mlx_lm(args, read_config(find_model(name)))
    if reason is not None:
        args.model = name
        run_mlx_lm("generate", mlx_lm_arguments(make_parser(), args), reason)
        return
    refuse(
        image=(args.image, "this family is run as text only; leave it out"),
        max_kv_size=(args.max_kv_size, REFUSED["max_kv_size"]),
        draft_model=(args.draft_model, REFUSED["draft_model"]),
    )
    prompt = read_text(args.prompt, unescape=True)
    for text in (args.system_prompt, args.prefill_response):
        if text is not None:
            require_unicode(text)
    if args.seed is not None:
        if not 0 <= args.seed < 2**64:
            raise ValueError(f"--seed {args.seed}: give an integer from 0 to 2^64 - 1")
        mx.random.seed(args.seed)
    tokenizer_config["trust_remote_code"] = args.trust_remote_code
    model, tokenizer = load(name, tokenizer_config, adapter_path=args.adapter_path)
    add_eos_tokens(tokenizer, args.extra_eos_token)
    if args.use_default_chat_template and not tokenizer.has_chat_template:
        refuse(use_default_chat_template=(True, "the tokenizer has no chat template, and there is no default one"))

    use_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_template:
        prompt = _apply_template(tokenizer, prompt, args, template_options, suffix_only=cache is not None)
    tokens = tokenizer.encode(prompt, add_special_tokens=not use_template)
    text = generate(
        model,
        tokenizer,
        tokens,
        verbose=args.verbose,
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        prompt_cache=cache,
        **sampling_options(args, tokenizer),
    )
    if not args.verbose:
        print(text)


def _why_mlx_lm(args: argparse.Namespace, config: dict[str, Any]) -> str | None:
    """Why mlx_lm's own command has to run; None where the kernels do."""
    if args.kv_bits is not None:
        return "--kv-bits quantises keys and values, which the attention kernels do not read"
    return why_mlx_lm(config | {"quantize_activations": args.quantize_activations})


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


def _apply_template(
    tokenizer: Any, prompt: str, args: argparse.Namespace, options: dict[str, Any], suffix_only: bool
) -> str:
    """The text of the conversation; with `suffix_only` from the prompt on, because a cache holds what is before it."""

    def render(query: str) -> str:
        messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
        messages.append({"role": "user", "content": query})
        prefill = args.prefill_response is not None
        if prefill:
            messages.append({"role": "assistant", "content": args.prefill_response})
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=prefill,
            add_generation_prompt=not prefill,
            **options,
        )
        return text

    if not suffix_only:
        return render(prompt)
    mark = "<the query>"
    return render(prompt)[render(mark).index(mark) :]


def sampling_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The sampling inside the kernels that the flags ask for."""
    options = {name: getattr(args, name) for name in ("temp", "seed", *_FILTERS)}
    if args.xtc_probability > 0:
        options["xtc_special_tokens"] = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return options


if __name__ == "__main__":
    main()
