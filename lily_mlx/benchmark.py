"""Command `lily_mlx.benchmark`: the flags and the output of `mlx_lm.benchmark`.

A random prompt from seed 0 and no end-of-sequence token, so that every trial does the same work.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mlx.core as mx

from lily_mlx.api import batch_generate, stream_generate
from lily_mlx.command import add_backend, mlx_lm_arguments, model_path, refuse, run, run_mlx_lm
from lily_mlx.loading import find_model, load, why_mlx_lm
from lily_mlx.model import read_config

PROGRAM = "lily_mlx.benchmark"

_REPORTED = ("prompt_tps", "generation_tps", "peak_memory")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags: all of mlx_lm's, and `--backend`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Time prefill and generation with lily_mlx's kernels")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add_backend(parser)
    add("--prompt-tokens", "-p", type=int, default=512, help="tokens of the random prompt (default: 512)")
    add("--generation-tokens", "-g", type=int, default=1024, help="tokens to generate (default: 1024)")
    add("--batch-size", "-b", type=int, default=1, help="prompts at once; they take turns (default: 1)")
    add("--num-trials", "-n", type=int, default=5, help="timed runs, after one that is not (default: 5)")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at once (default: 2048)")
    add("--delay", type=int, default=0, help="seconds to wait before each trial (default: 0)")
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer or a model")
    add("--quantize-activations", "-qa", action="store_true", help="on mlx_lm's own path, with a notice")
    add("--pipeline", action="store_true", help="not supported: the kernels run on one device")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    run(PROGRAM, make_parser().parse_args(arguments), _run)


def _run(args: argparse.Namespace) -> None:
    for name in ("prompt_tokens", "generation_tokens", "batch_size", "num_trials"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 1 or more")
    name = model_path(args.model)
    reason = why_mlx_lm(read_config(find_model(name)) | {"quantize_activations": args.quantize_activations})
    if reason is not None:
        args.model = name
        run_mlx_lm("benchmark", mlx_lm_arguments(make_parser(), args), reason)
        return
    refuse(pipeline=(args.pipeline, "the kernels run on one device; leave it out"))
    mx.random.seed(0)
    model, tokenizer = load(name, {"trust_remote_code": args.trust_remote_code})
    tokenizer.eos_token_ids = set()
    shape = (args.batch_size, args.prompt_tokens)
    prompts: Any = mx.random.randint(0, model.config.vocab_size, shape).tolist()
    options = {"max_tokens": args.generation_tokens, "prefill_step_size": args.prefill_step_size}

    def trial() -> Any:
        if args.batch_size > 1:
            return batch_generate(model, tokenizer, prompts, **options).stats
        *_, last = stream_generate(model, tokenizer, prompts[0], **options)
        return last

    print("Running warmup..")
    trial()
    prompt_tokens, generation_tokens, batch_size = args.prompt_tokens, args.generation_tokens, args.batch_size
    print(f"Timing with {prompt_tokens=}, {generation_tokens=}, {batch_size=}.")
    results = []
    for number in range(1, args.num_trials + 1):
        time.sleep(max(args.delay, 0))
        start = time.perf_counter()
        response = trial()
        total_time = time.perf_counter() - start
        results.append({name: getattr(response, name) for name in _REPORTED})
        print(f"Trial {number}:  {_listed(results[-1] | {'total_time': total_time})}", flush=True)
    print(f"Averages: {_listed({n: sum(r[n] for r in results) / len(results) for n in _REPORTED})}")


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.3f}" for name, value in values.items())


if __name__ == "__main__":
    main()
