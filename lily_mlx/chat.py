"""Command `lily_mlx.chat`: the flags of `mlx_lm.chat`; a conversation whose turns cost only what is new."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import mlx.core as mx

from lily_mlx.api import REFUSED
from lily_mlx.command import add_backend, mlx_lm_arguments, model_path, refuse, run, run_mlx_lm
from lily_mlx.conversation import Conversation
from lily_mlx.engine import make_sampling
from lily_mlx.generate import sampling_options
from lily_mlx.loading import find_model, load, why_mlx_lm
from lily_mlx.model import read_config

PROGRAM = "lily_mlx.chat"

_HELP = "commands: q to leave, r to start anew, h for this help; Ctrl-C ends an answer"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags: all of mlx_lm's, and `--backend`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Chat with a model run by lily_mlx's kernels")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add_backend(parser)
    add("--system-prompt", help="system message of the chat template")
    add("--max-tokens", "-m", type=int, default=256, help="tokens of an answer, -1 for no limit (default: 256)")
    add("--temp", type=float, default=0.0, help="temperature of sampling; 0 takes the most likely token")
    add("--top-p", type=float, default=1.0, help="sample from the most likely tokens with this total probability")
    add("--xtc-probability", type=float, default=0.0, help="how often XTC drops the most likely tokens")
    add("--xtc-threshold", type=float, default=0.1, help="probability above which XTC may drop a token")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at once (default: 2048)")
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer or a model")
    add("--adapter-path", help="directory of LoRA adapters, which are fused into the weights")
    add("--max-kv-size", type=int, help="for models of other families; refused for this one")
    add("--pipeline", action="store_true", help="not supported: the kernels run on one device")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    run(PROGRAM, make_parser().parse_args(arguments), _run)


def _run(args: argparse.Namespace) -> None:
    name = model_path(args.model)
    reason = why_mlx_lm(read_config(find_model(name)))
    if reason is not None:
        args.model = name
        run_mlx_lm("chat", mlx_lm_arguments(make_parser(), args), reason)
        return
    refuse(
        max_kv_size=(args.max_kv_size, REFUSED["max_kv_size"]),
        pipeline=(args.pipeline, "the kernels run on one device; leave it out"),
    )
    if args.max_tokens == 0 or args.max_tokens < -1:
        raise ValueError(f"--max-tokens is {args.max_tokens}: give a positive number, or -1 for no limit")
    mx.random.seed(args.seed)
    tokenizer_config = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer = load(name, tokenizer_config, adapter_path=args.adapter_path)
    sampling = sampling_options(_sampling(args), tokenizer)
    make_sampling(**sampling)  # bad values are reported before the chat begins
    options = {"max_tokens": args.max_tokens, "prefill_step_size": args.prefill_step_size, **sampling}
    print(f"{PROGRAM}: {name}\n{_HELP}")
    _converse(Conversation(model, tokenizer, args.system_prompt), options)


def _sampling(args: argparse.Namespace) -> argparse.Namespace:
    """The sampling flags with those that only `generate` has; each answer draws its seed from `mx.random`."""
    return argparse.Namespace(**{**vars(args), "seed": None}, min_p=0.0, top_k=0, min_tokens_to_keep=1)


def _converse(conversation: Conversation, options: dict[str, Any]) -> None:
    """Asks until the user leaves: by q, at the end of stdin, or by Ctrl-C while nothing is generated."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() gets editing and history)
    while True:
        try:
            query = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if query == "q":
            return
        if query == "h":
            print(_HELP)
        elif query == "r":
            conversation.reset()
            print("The conversation starts anew.")
        elif query:
            _answer(conversation, query, options)


def _answer(conversation: Conversation, query: str, options: dict[str, Any]) -> None:
    response, interrupted = None, False
    responses = conversation.ask(query, **options)
    try:
        with contextlib.closing(responses):  # type: ignore[type-var]
            for response in responses:
                print(response.text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return
    print()
    if response is not None:
        new = conversation.prompt_tokens - conversation.reused_tokens
        print(
            f"[{response.generation_tokens} tokens, {response.generation_tps:.1f} tok/s; prompt "
            f"{conversation.prompt_tokens} tokens, {conversation.reused_tokens} reused, "
            f"{new / conversation.prompt_seconds:.1f} tok/s; peak {response.peak_memory:.2f} GB"
            f"{'; interrupted' if interrupted else ''}]"
        )


if __name__ == "__main__":
    main()
