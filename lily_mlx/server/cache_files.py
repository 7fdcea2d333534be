"""Files of the prefix cache on disk: safetensors, written whole or not at all, checked when they are read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "lily_mlx.prompt_cache.1"
PARTIAL = ".partial"  # ending of files that are being written

# bfloat16 values are held as their 16 bits, for which NumPy has no name.
_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.uint16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint32): "U32",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 10**7


class DamagedFileError(Exception):
    """A file that is not what was written."""


def write(path: Path, arrays: Mapping[str, np.ndarray], identity: str) -> int:
    """Writes a file under a temporary name and renames it, so that no reader ever sees a part.

    Only this user can read it. It is not forced to the disk: what a loss of power leaves behind fails the checks of `read`.

    Args:
        path: of the file; its directory exists.
        arrays: uint16 for bfloat16, float32 or uint32.
        identity: what the contents depend on.

    Returns:
        Bytes of the file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    header: dict[str, object] = {}
    data, offset, checksum = [], 0, 0
    for name, array in arrays.items():
        part = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        end = offset + part.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        checksum, offset = zlib.crc32(part, checksum), end
        data.append(part)
    header["__metadata__"] = {"format": FORMAT, "identity": identity, "crc32": str(checksum)}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb", opener=_for_this_user) as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.writelines(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return 8 + len(head) + offset


def read(path: Path, identity: str) -> dict[str, np.ndarray]:
    """Reads and checks a file.

    Returns:
        The arrays, read-only; see `write`.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: it is cut off, changed, of another identity or of another format.
        OSError: it cannot be read.
    """
    contents = path.read_bytes()
    try:
        size = int.from_bytes(contents[:8], "little")
        if not 0 < size <= min(_LONGEST_HEADER, len(contents) - 8):
            raise DamagedFileError("it has no header")
        header = json.loads(contents[8 : 8 + size])
        metadata = header.pop("__metadata__")
        if (metadata["format"], metadata["identity"]) != (FORMAT, identity):
            raise DamagedFileError("it is of another model or version")
        data = memoryview(contents)[8 + size :]
        if str(zlib.crc32(data)) != metadata["crc32"]:
            raise DamagedFileError("its checksum is wrong")
        return {name: _array(data, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"its header is wrong ({error!r})") from error


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _array(data: memoryview, entry: Mapping[str, Any]) -> np.ndarray:
    start, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array is outside the file")
    return np.frombuffer(data[start:end], dtype).reshape(shape)
