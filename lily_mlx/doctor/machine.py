"""What a report says about the machine, and what it leaves out."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.metal import current_backend, engine_choice

PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE_SUFFIXES = (".metal", ".h", ".cuh", ".cpp", ".S", ".py")
_SHORTEST_NAME = 3  # shorter user names would match inside words


def describe() -> dict[str, str]:
    """Device, operating system and versions, by what they are."""
    from lily_mlx import __version__  # the package imports the engine, which imports this

    return {
        "device": device_name(),
        "memory": _memory(),
        "os": os_name(),
        "python": platform.python_version(),
        "mlx": _version("mlx"),
        "mlx-lm": _version("mlx-lm"),
        "lily_mlx": __version__,
        "source": source_digest(),
        "backend": current_backend(),
        "matrices": matrices(),
    }


def device_name() -> str:
    """The name of the device that MLX computes on."""
    info = mx.device_info()
    if mx.default_device() == mx.gpu and "device_name" in info:
        return str(info["device_name"])
    return f"CPU: {info.get('device_name') or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def matrices() -> str:
    """What multiplies the tiles of prefill, and why."""
    choice = engine_choice()
    return f"{choice.name} ({choice.reason})"


def os_name() -> str:
    """The operating system with its version."""
    release = platform.mac_ver()[0]
    return f"macOS {release} ({platform.machine()})" if release else platform.platform()


@cache
def source_digest() -> str:
    """A short hash of everything that decides what the kernels do and how they are checked."""
    digest = hashlib.sha256()
    for folder in ("metal", "kernels", "fallback", "doctor"):
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in _SOURCE_SUFFIXES:
                digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def without_private_words(value: Any) -> Any:
    """A report with folders, user names and host names taken out of every text in it."""
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, dict):
        return {key: without_private_words(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_private_words(item) for item in value]
    return value


# A path is recognised by its root: the folders go, the last name stays.
_FOLDERS = re.compile(r"(?<![\w/.*])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:;,'\"()<>|]+[/\\])+")


def _clean(text: str) -> str:
    text = text.replace(str(Path.home()) + os.sep, "/home/folder/")  # whose own name may hold blanks
    text = _FOLDERS.sub("", text)
    for name in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


@cache
def _names() -> tuple[str, ...]:
    found = {Path.home().name, socket.gethostname(), socket.gethostname().split(".")[0]}
    try:
        found.add(getpass.getuser())
    except (OSError, KeyError):  # no such user in this container
        found.discard("")
    return tuple(sorted((n for n in found if len(n) >= _SHORTEST_NAME), key=len, reverse=True))


def _memory() -> str:
    size = mx.device_info().get("memory_size") or mx.device_info().get("total_memory")
    if not size and hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{int(size) / 2**30:.0f} GiB" if size else "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
