"""`python -m lily_mlx COMMAND` and `lily_mlx COMMAND`: the same as the command `lily_mlx.COMMAND`."""

from __future__ import annotations

import importlib
import sys

COMMANDS = ("benchmark", "cache_prompt", "chat", "doctor", "generate", "server")


def main() -> None:
    """Runs the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        from lily_mlx import __version__

        print(__version__)
    elif name in ("-h", "--help"):
        print(f"usage: lily_mlx COMMAND ...\n\ncommands: {', '.join(COMMANDS)}\n\nSee COMMAND --help.")
    elif name in COMMANDS:
        importlib.import_module(f"lily_mlx.{name}").main(sys.argv[2:])
    else:
        print(f"lily_mlx: unknown command {name!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
