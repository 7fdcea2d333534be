"""Command `lily_mlx.server`: mlx_lm.server's flags where they make sense, and a few of its own."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from lily_mlx.api import REFUSED
from lily_mlx.command import add_backend, json_object, mlx_lm_arguments, model_path, refuse, run, run_mlx_lm
from lily_mlx.loading import find_model, load, why_mlx_lm
from lily_mlx.model import read_config

logger = logging.getLogger("lily_mlx")

PROGRAM = "lily_mlx.server"

DEFAULT_DISK_BYTES = 32 * 10**9  # of --prompt-cache-disk-bytes

# Flags that mlx_lm.server does not have.
OWN_FLAGS = ("max_waiting", "max_body_bytes", "shutdown_seconds", "prompt_cache_dir", "prompt_cache_disk_bytes")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Serve a model with lily_mlx's kernels over HTTP")
    add = parser.add_argument
    add("--model", help="a model directory or a Hugging Face name; without it the bundled tiny checkpoint")
    add_backend(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    add("--allowed-origins", default="*", help="origins of web pages, with commas between (default: *)")
    add("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    add("--trust-remote-code", action="store_true", help="allow code that comes with a tokenizer or a model")
    add("--adapter-path", help="directory of LoRA adapters, which are fused into the weights")
    add("--chat-template", default="", help="text of a chat template that replaces the model's")
    add("--chat-template-args", default="{}", help="JSON object of options for the chat template")
    add("--use-default-chat-template", action="store_true", help="needs a tokenizer that has a chat template")
    add("--temp", type=float, default=0.0, help="temperature of requests that give none (default: 0)")
    add("--top-p", type=float, default=1.0, help="top-p of requests that give none (default: 1)")
    add("--top-k", type=int, default=0, help="top-k of requests that give none (default: 0, all tokens)")
    add("--min-p", type=float, default=0.0, help="min-p of requests that give none (default: 0)")
    add("--max-tokens", type=int, default=512, help="tokens of an answer to requests that do not say (default: 512)")
    add("--decode-concurrency", type=int, default=32, help="answers that are generated at once (default: 32)")
    add("--prompt-concurrency", type=int, default=8, help="prompts among them processed in turns (default: 8)")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens processed at once (default: 2048)")
    add("--prompt-cache-size", type=int, help="most snapshots in the prefix cache (default: as the bytes allow)")
    add("--prompt-cache-bytes", type=size_in_bytes, default=8 * 10**9, help="bytes of the prefix cache (default: 8GB)")
    add("--prompt-cache-dir", help="directory that keeps the prefix cache for the next start (default: none)")
    add(
        "--prompt-cache-disk-bytes",
        type=size_in_bytes,
        help="bytes of the files in --prompt-cache-dir (default: 32GB)",
    )
    add("--max-waiting", type=int, default=256, help="answers that may wait in the queue (default: 256)")
    add("--max-body-bytes", type=size_in_bytes, default=32 * 10**6, help="largest body of a request (default: 32MB)")
    add("--shutdown-seconds", type=int, default=30, help="time for running answers at the end (default: 30)")
    refused = parser.add_argument_group("flags that the kernels cannot act on")
    add = refused.add_argument
    add("--kv-bits", type=int, help="bits of the keys and values; makes mlx_lm's own server run")
    add("--kv-group-size", type=int, default=64, help="values that share a scale with --kv-bits (default: 64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before --kv-bits takes effect (default: 5000)")
    add("--draft-model", help="model of speculative decoding; refused")
    add("--num-draft-tokens", type=int, default=3, help="tokens that --draft-model proposes at once (default: 3)")
    add("--pipeline", action="store_true", help="several devices; refused")
    return parser


def size_in_bytes(text: str) -> int:
    """A number of bytes, with `KB`, `MB`, `GB` or their first letters for powers of 1000, as in mlx_lm."""
    number = text.strip().upper().removesuffix("B")
    digits = {"K": 3, "M": 6, "G": 9, "T": 12}.get(number[-1:], 0)
    try:
        size = float(number[:-1] if digits else number) * 10**digits
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or a number with KB, MB or GB") from None
    if not 0 <= size < 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 0 or more")
    return int(size)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Bad input ends with a message on stderr and exit code 1; bad usage with code 2."""
    run(PROGRAM, make_parser().parse_args(arguments), _run)


def _run(args: argparse.Namespace) -> None:
    name = model_path(args.model)
    config = read_config(find_model(name))
    reason = why_mlx_lm(config)
    if args.kv_bits is not None:
        reason = "--kv-bits quantises keys and values, which the attention kernels do not read"
    if reason is not None:
        args.model = name
        parser = make_parser()
        for flag in OWN_FLAGS:
            if getattr(args, flag) != parser.get_default(flag):
                logger.warning("--%s has no effect: mlx_lm.server has no such flag", flag.replace("_", "-"))
            setattr(args, flag, parser.get_default(flag))
        run_mlx_lm("server", mlx_lm_arguments(parser, args), reason)
        return
    refuse(
        draft_model=(args.draft_model, REFUSED["draft_model"]),
        pipeline=(args.pipeline, "the kernels run on one device; leave it out"),
    )
    serve(args, name)


def serve(args: argparse.Namespace, name: str) -> None:
    """Loads the model and serves until a signal ends it.

    Raises:
        ValueError: a flag is out of its range, or the packages of the extra `server` are missing.
    """
    try:
        import uvicorn

        from .app import Server
    except ImportError as error:
        raise ValueError(f"{error}: install the server's packages with pip install 'lily_mlx[server]'") from error
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from .worker import Worker

    settings, limits = make_settings(args, name)

    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    tokenizer_config: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.chat_template:
        tokenizer_config["chat_template"] = args.chat_template
    maybe_set_recommended_wired_limit()
    worker = Worker(lambda: load(name, tokenizer_config, adapter_path=args.adapter_path), limits, _disk(args, name))
    worker.start()
    if args.use_default_chat_template and not worker.tokenizer.has_chat_template:
        refuse(use_default_chat_template=(True, "the tokenizer has no chat template, and there is no default one"))
    try:
        uvicorn.run(
            Server(worker, settings).application(),
            host=args.host,
            port=args.port,
            log_level=args.log_level.lower(),
            timeout_graceful_shutdown=args.shutdown_seconds,
        )
    finally:
        worker.stop()


def _disk(args: argparse.Namespace, name: str) -> Any:
    """The prefix cache on disk that the flags ask for; None for none.

    Raises:
        ValueError: the directory cannot be made, or the flags contradict each other.
    """
    from .disk_cache import DiskCache
    from .identity import identity

    size = args.prompt_cache_disk_bytes
    if args.prompt_cache_dir is None:
        if size is not None:
            raise ValueError(
                f"--prompt-cache-disk-bytes is {size}, without --prompt-cache-dir: name a directory as well"
            )
        return None
    for flag in ("prompt_cache_bytes", "prompt_cache_size"):
        if getattr(args, flag) == 0:
            raise ValueError(
                f"--{flag.replace('_', '-')} is 0, and what --prompt-cache-dir keeps is read into memory: give more"
            )
    directory = Path(args.prompt_cache_dir).expanduser()
    try:
        model = identity(find_model(name), args.adapter_path)
        return DiskCache(directory, DEFAULT_DISK_BYTES if size is None else size, model)
    except OSError as error:
        raise ValueError(f"--prompt-cache-dir {str(directory)!r} cannot be used: {error}") from error


def make_settings(args: argparse.Namespace, name: str) -> tuple[Any, Any]:
    """The settings and limits that the flags ask for.

    Raises:
        ValueError: a flag is out of its range.
    """
    from .app import Settings
    from .errors import RequestError
    from .protocol import Defaults, parse_request
    from .worker import Limits

    for flag in ("decode_concurrency", "prompt_concurrency", "prefill_step_size", "max_tokens"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: give 1 or more")
    for flag in ("max_waiting", "shutdown_seconds"):
        if getattr(args, flag) < 0:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: give 0 or more")
    sampling = {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    try:  # the same ranges as in requests
        parse_request({"prompt": [0], **sampling}, False, Defaults(), 2**31)
    except RequestError as error:
        raise ValueError(f"the default {error.message}") from error
    defaults = Defaults(max_tokens=args.max_tokens, **sampling)
    settings = Settings(
        model_name=name,
        defaults=defaults,
        template_options=json_object("--chat-template-args", args.chat_template_args),
        allowed_origins=tuple(args.allowed_origins.split(",")),
        max_body_bytes=args.max_body_bytes,
    )
    limits = Limits(
        decode_concurrency=args.decode_concurrency,
        prompt_concurrency=args.prompt_concurrency,
        waiting=args.max_waiting,
        chunk_size=args.prefill_step_size,
        cache_bytes=args.prompt_cache_bytes,
        cache_snapshots=args.prompt_cache_size,
    )
    return settings, limits
