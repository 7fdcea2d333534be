"""Command `lily_mlx.cache_prompt`: processes a prompt once, for any number of prompts that continue it.

The file is the one that `mlx_lm.cache_prompt` writes: `--prompt-cache-file` of both `generate` commands reads it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx import prompt_files
from lily_mlx.api import REFUSED, generate_step
from lily_mlx.command import add_backend, mlx_lm_arguments, model_path, read_text, refuse, run, run_mlx_lm
from lily_mlx.loading import find_model, load, why_mlx_lm
from lily_mlx.model import read_config

PROGRAM = "lily_mlx.cache_prompt"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags: all of mlx_lm's, and `--backend`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Process a prompt and keep its state in a file")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add_backend(parser)
    add("--prompt-cache-file", required=True, help="the file to write")
    add("--prompt", required=True, help="the text to process; '-' reads it from stdin")
    add("--adapter-path", help="directory of LoRA adapters, which are fused into the weights")
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer or a model")
    add("--eos-token", help="the tokenizer's end-of-sequence token")
    add("--max-kv-size", type=int, help="for models of other families; refused for this one")
    add("--kv-bits", type=int, help="bits of the keys and values; on mlx_lm's own path, with a notice")
    add("--kv-group-size", type=int, default=64, help="values that share a scale with --kv-bits (default: 64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before --kv-bits takes effect (default: 5000)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    run(PROGRAM, make_parser().parse_args(arguments), _run)


def _run(args: argparse.Namespace) -> None:
    target = Path(args.prompt_cache_file)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"--prompt-cache-file {args.prompt_cache_file!r}: there is no directory for it")
    name = model_path(args.model)
    reason = why_mlx_lm(read_config(find_model(name)))
    if args.kv_bits is not None:
        reason = "--kv-bits quantises keys and values, which the attention kernels do not read"
    if reason is not None:
        args.model = name
        run_mlx_lm("cache_prompt", mlx_lm_arguments(make_parser(), args), reason)
        return
    refuse(max_kv_size=(args.max_kv_size, REFUSED["max_kv_size"]))
    tokenizer_config: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.eos_token is not None:
        tokenizer_config["eos_token"] = args.eos_token
    text = read_text(args.prompt)
    model, tokenizer = load(name, tokenizer_config, adapter_path=args.adapter_path)
    cache = model.make_cache()
    options = {"max_tokens": 0, "prompt_cache": cache, "prompt_progress_callback": _Progress()}
    for _ in generate_step(mx.array(_encode(tokenizer, text), mx.uint32), model, **options):
        pass
    print()
    print(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    print("Saving...")
    prompt_files.save(target, cache, name, tokenizer_config)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a message to the model that goes on, or of the text where there is no chat template."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True))


class _Progress:
    """Prints how many tokens are processed, over itself."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, processed: int, total: int) -> None:
        speed = processed / max(time.perf_counter() - self._start, 1e-9)
        print(f"\rProcessed {processed:6d} tokens ({speed:6.2f} tok/s)    ", end="", flush=True)


if __name__ == "__main__":
    main()
