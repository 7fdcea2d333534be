"""Files that keep what was found out about a device, and which check was running when a process ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ENDED = "the process ended while it ran"

logger = logging.getLogger("lily_mlx")


def write_note(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file whole or not at all; a directory that cannot be written only means more runs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(file, path)
    except OSError as error:
        logger.info("the verdict about the kernels is not kept: %s", error)


def is_alive(process: object) -> bool:
    """Whether there is a process of this number; what is no number is none."""
    try:
        os.kill(int(str(process)), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:  # it exists and is another user's
        return True
    return True


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
