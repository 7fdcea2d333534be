"""What the commands share: flags, errors, exit codes, and the way to mlx_lm's own commands."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from lily_mlx.metal import KernelError, current_backend, use_backend

logger = logging.getLogger("lily_mlx")

INTERRUPTED = 130  # the exit code of shells for a program that Ctrl-C ended
READER_LEFT = 141  # and for one whose output nobody reads any more


def run(program: str, args: argparse.Namespace, action: Callable[[argparse.Namespace], None]) -> None:
    """Runs a command on the backend of its `--backend`.

    Bad input ends with one message on stderr and exit code 1, Ctrl-C with exit code 130; neither shows a traceback.
    """
    try:
        with use_backend(args.backend) if args.backend else contextlib.nullcontext(), reader_may_leave():
            current_backend()  # an unknown backend is reported before a model is read
            action(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ValueError, OSError, KernelError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(1)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process without a word, exit code 141, when the reader of its output has left (`... | head`).

    A broken pipe of another kind stays an error.
    """
    try:
        yield
    except BrokenPipeError:
        if not _reader_left():
            raise
        sys.exit(READER_LEFT)
    finally:
        left = _reader_left()
    if left:
        sys.exit(READER_LEFT)


def _reader_left() -> bool:
    """Whether nobody reads standard output any more; what is left to write is then dropped."""
    try:
        sys.stdout.flush()
        pipe = select.poll()
        pipe.register(sys.stdout, select.POLLOUT)
        left = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    except BrokenPipeError:
        left = True
    except (OSError, ValueError):  # no file, as in a notebook, or closed
        return False
    if left:
        # Python would flush once more at its end, and complain.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return left


def run_mlx_lm(command: str, arguments: Sequence[str], reason: str) -> None:
    """Runs the command of mlx_lm itself in this process, after a notice with the reason.

    Args:
        command: its name without `mlx_lm.`.
        arguments: of the command line, in mlx_lm's flags.
    """
    logger.warning("this runs on mlx_lm's own path: %s", reason)
    module = importlib.import_module(f"mlx_lm.{command}")
    with mock.patch.object(sys, "argv", [f"mlx_lm.{command}", *arguments]):
        module.main()


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds `--backend`, the one flag that mlx_lm's commands do not have."""
    parser.add_argument(
        "--backend", choices=("metal", "cuda", "cpu"), help="where kernels run; the default is this machine's GPU"
    )


def mlx_lm_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The command line for mlx_lm: every flag that differs from its default, without `--backend`."""
    arguments: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or action.dest in ("help", "backend") or value == action.default:
            continue
        flag = action.option_strings[0]
        if isinstance(action.default, bool) and action.nargs == 0:
            arguments.append(flag)
        elif isinstance(value, (list, tuple)):
            arguments += [flag, *map(str, value)]
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def model_path(model: str | None) -> str:
    """The model to load: the bundled checkpoint, with a notice, where none is given."""
    if model is not None:
        return model
    from lily_mlx.checkpoints import bundled_checkpoint

    path = bundled_checkpoint()
    print(f"No --model given: using the tiny bundled checkpoint on the {current_backend()} backend.", file=sys.stderr)
    return str(path)


def read_text(argument: str, unescape: bool = False) -> str:
    r"""A prompt: the argument, or all of stdin if that is '-'.

    Args:
        unescape: make `\n` and `\t` in the argument newline and tab, which leaves text from stdin as it is.

    Raises:
        ValueError: the prompt is not UTF-8.
    """
    if unescape:
        argument = argument.replace("\\n", "\n").replace("\\t", "\t")
    if argument != "-":
        from lily_mlx.api import require_unicode

        require_unicode(argument)
        return argument
    data = sys.stdin.buffer.read()
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt on stdin is not valid UTF-8 at byte {error.start}: convert it, for example with iconv"
        ) from error


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object in a flag's value; an empty one where it is not given."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{flag} {text!r} is not a JSON object")
    return value


def truth(text: str) -> bool:
    """mlx_lm's reading of a flag's truth value: only `False` and `f` are false, in any case."""
    return text.lower() not in ("false", "f")


def refuse(**flags: tuple[Any, str]) -> None:
    """Raises ValueError for a flag that is set, with the reason and the remedy; the name is that of its dest."""
    for name, (value, reason) in flags.items():
        if value:
            raise ValueError(f"--{name.replace('_', '-')} is not supported by lily_mlx: {reason}")


def existing_file(flag: str, path: str) -> Path:
    """A file that a flag names.

    Raises:
        FileNotFoundError: there is none.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag} {path!r} does not exist or is not a file")
    return Path(path)
