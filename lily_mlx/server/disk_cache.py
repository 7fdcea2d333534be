"""`DiskCache`: snapshots of the prefix cache in a directory, for after a restart and for when memory is short."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from lily_mlx.model import arrays_of, with_arrays

from .cache_files import PARTIAL, DamagedFileError, read, write
from .snapshots import BLOCK_ROWS, Snapshot

logger = logging.getLogger("lily_mlx")

SHORTEST = BLOCK_ROWS  # tokens that a file has to save: fewer are computed as fast as they are read
PAUSE_SECONDS = 30.0  # without writing after a failure
_MOST_WAITING = 2 * 10**9  # bytes that wait to be written, but for a single snapshot that is larger
_SCAN_SECONDS = 60.0
_ABANDONED_SECONDS = 3600.0
_SUFFIX = ".safetensors"
_STATE, _BLOCK = "state", "block"


@dataclass(frozen=True)
class Stored:
    """A snapshot that was read.

    Attributes:
        length: tokens.
        first_block: number of the first block in `blocks`; those before were not asked for.
        blocks, layers: as in `Snapshot`, uint16 for bfloat16.
    """

    length: int
    first_block: int
    blocks: list[np.ndarray]
    layers: list[np.ndarray]

    def snapshot(self, template: Snapshot, before: Sequence[mx.array]) -> Snapshot:
        """The snapshot on the device.

        Args:
            template: any snapshot of the model.
            before: the blocks before `first_block`.
        """
        layers = with_arrays(template.layers, map(_to_device, self.layers))
        return Snapshot(self.length, (*before[: self.first_block], *map(_to_device, self.blocks)), layers)


class DiskCache:
    """A directory of snapshots.

    Files are named by a digest of all tokens that led to their contents and of the identity, so what is there is known
    from the names alone. A snapshot is one file for its state and one for each block of keys and values; snapshots
    that begin with the same tokens share the files of their blocks. Several servers may use one directory.

    A thread of its own writes and makes room: the files that were not used for longest go first. What goes wrong is
    counted and logged, and the server goes on without.

    Args:
        directory: made if need be.
        max_bytes: of all files in it.
        identity: names everything besides tokens that the contents depend on.

    Attributes:
        bytes: of the files, as far as known.
        reads, writes: snapshots read and written.
        skipped: snapshots that were not written, because of earlier errors or because too many wait.
        errors: files that could not be read or written.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, directory: Path, max_bytes: int, identity: str):
        self.max_bytes, self.identity = max_bytes, hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        self.bytes = self.reads = self.writes = self.skipped = self.errors = 0
        self._root, self._directory = directory, directory / self.identity
        self._make_directories()
        self._template: Snapshot | None = None
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._seen_at = -1
        self._scanned = 0.0
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._waiting_bytes = 0
        self._paused_until = 0.0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="prompt-cache-writer", daemon=True)

    def start(self, template: Snapshot) -> None:
        """Starts to write and to find.

        Args:
            template: any snapshot of the model; what is read has to have its shapes.
        """
        self._template = template
        self._refresh()
        self._thread.start()

    def close(self, seconds: float = 10.0) -> None:
        """Writes what waits, as far as the time allows."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(seconds)

    def keep(self, tokens: np.ndarray, snapshot: Snapshot) -> None:
        """Has a snapshot written, unless it is there. Called on the GPU thread, which does not wait for it.

        Args:
            tokens: uint32 [n], all of the snapshot.
        """
        if snapshot.length < SHORTEST or self._template is None:
            return
        state, blocks = self._files(tokens)
        with self._lock:
            new = [i for i, name in enumerate(blocks) if name not in self._names]
            if state in self._names and not new:
                return
            size = sum(a.nbytes for a in arrays_of((snapshot.layers, [snapshot.blocks[i] for i in new])))
            limit = min(_MOST_WAITING, self.max_bytes)
            full = size > self.max_bytes or (self._waiting_bytes and self._waiting_bytes + size > limit)
            if full or time.monotonic() < self._paused_until:
                self.skipped += 1
                return
            self._waiting_bytes += size
            self._names.update((state, *blocks))  # once is enough
        # Copies that no other thread knows of: on some devices reading an array moves it.
        layers = [_copy(array) for array in arrays_of(snapshot.layers)]
        copies = {blocks[i]: (_copy(snapshot.blocks[i]), i) for i in new}
        mx.async_eval(layers, [array for array, _ in copies.values()])
        self._jobs.put(_Job(tokens, size, state, layers, copies))

    def touch(self, tokens: np.ndarray) -> None:
        """Notes that a snapshot is in use."""
        if len(tokens) >= SHORTEST:
            self._jobs.put(_Job(tokens))

    def find(self, tokens: np.ndarray, longer_than: int, first_block: int, longest: int) -> Stored | None:
        """Reads the longest snapshot that is a real prefix of the tokens. Not for the GPU thread: it may take a while.

        Args:
            tokens: uint32 [n].
            longer_than: a snapshot of so many tokens is known already.
            first_block: number of the first block that is not known already.
            longest: tokens of the longest snapshot that is of use.
        """
        if self._template is None or len(tokens) <= longer_than + SHORTEST:
            return None
        self._refresh()
        with self._lock:
            lengths = sorted({int(name.split("-")[1]) for name in self._names if name.startswith(_STATE)})
            lengths = [n for n in lengths if longer_than + SHORTEST <= n <= min(longest, len(tokens) - 1)]
            named = [(n, self._name(_STATE, n, digest)) for n, digest in self._digests(tokens, lengths)]
            there = [(n, name) for n, name in reversed(named) if name in self._names]
        for length, name in there:
            stored = self._read(tokens[:length], name, first_block)
            if stored is not None:
                self.reads += 1
                return stored
        return None

    def _read(self, tokens: np.ndarray, state: str, first_block: int) -> Stored | None:
        """A snapshot, if all of its files are there and sound; a file that is not sound is removed."""
        assert self._template is not None
        _, names = self._files(tokens)
        first_block = min(first_block, len(names))
        shapes = [array.shape for array in arrays_of(self._template.layers)]
        path = self._directory / state
        try:
            arrays = read(path, self.identity)
            layers = [arrays[f"layer.{i}"] for i in range(len(arrays) - 1)]
            if not np.array_equal(arrays["tokens"], tokens) or [array.shape for array in layers] != shapes:
                raise DamagedFileError("it has other contents than its name says")
            blocks = []
            for i in range(first_block, len(names)):
                path = self._directory / names[i]
                arrays = read(path, self.identity)
                fed = tokens[i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS]
                if not np.array_equal(arrays["tokens"], fed) or arrays["rows"].shape != self._template.block_shape:
                    raise DamagedFileError("it has other contents than its name says")
                blocks.append(arrays["rows"])
        except FileNotFoundError:  # removed to make room, perhaps by another server; without it the state is of no use
            self._remove(state)
            return None
        except (DamagedFileError, KeyError) as error:
            self.errors += 1
            logger.warning("prompt cache: %s is left out and removed: %s", path, error)
            self._remove(path.name)
            self._remove(state)
            return None
        except (OSError, MemoryError) as error:
            self.errors += 1
            logger.warning("prompt cache: %s cannot be read: %s", path, error)
            return None
        self._used((state, *names))
        return Stored(len(tokens), first_block, blocks, layers)

    def _run(self) -> None:
        self._make_room()
        while (job := self._jobs.get()) is not None:
            try:
                if job.state:
                    self._write(job)
                else:
                    state, blocks = self._files(job.tokens)
                    self._used((state, *blocks))
            except Exception as error:
                self._failed(job, error)
            del job  # its arrays must not wait for the next one

    def _write(self, job: _Job) -> None:
        """Writes the blocks first: a state that is there has its blocks."""
        size = 0
        for name, (array, i) in job.blocks.items():
            rows = job.tokens[i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS]
            size += write(self._directory / name, {"tokens": rows, "rows": np.asarray(array)}, self.identity)
        layers = {f"layer.{i}": _as_float(array) for i, array in enumerate(job.layers)}
        size += write(self._directory / job.state, {"tokens": job.tokens, **layers}, self.identity)
        self.bytes += size
        if self._failing:
            self._failing = False
            logger.info("prompt cache: %s can be written again", self._directory)
        state, blocks = self._files(job.tokens)
        self._used((state, *blocks))
        if self.bytes > self.max_bytes or time.monotonic() - self._scanned > _SCAN_SECONDS:
            self._make_room()
        with self._lock:  # once: where this line is not reached, _failed does it
            self._waiting_bytes -= job.size
        self.writes += 1

    def _failed(self, job: _Job, error: Exception) -> None:
        """One line for any number of failures in a row."""
        with self._lock:
            self._waiting_bytes -= job.size
            self._names.difference_update((job.state, *job.blocks))
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        self.errors += 1
        if not self._failing:
            self._failing = True
            logger.warning("prompt cache: %s cannot be written, requests are not affected: %s", self._directory, error)
        with contextlib.suppress(OSError):
            self._make_directories()

    def _make_directories(self) -> None:
        """They hold what users wrote, so nobody else may look in."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def _make_room(self) -> None:
        """Removes files until the rest fits the budget: those not used for longest, and of one time the last blocks."""
        self._scanned = time.monotonic()
        now, files = time.time(), []
        for directory in _entries(self._root):
            for entry in _entries(directory.path) if directory.is_dir(follow_symlinks=False) else ():
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(PARTIAL) and now - status.st_mtime > _ABANDONED_SECONDS:
                        os.unlink(entry.path)  # a server that was killed while it wrote
                    elif length := _length(entry.name):
                        order = (status.st_mtime_ns, entry.name.startswith(_BLOCK), -length)
                        files.append((order, Path(entry.path), status.st_size))
        total = sum(size for _, _, size in files)
        for _, path, size in sorted(files):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
                with self._lock:
                    self._names.discard(path.name)
        self.bytes = total

    def _refresh(self) -> None:
        """Learns what other servers have written or removed."""
        try:
            changed = os.stat(self._directory).st_mtime_ns
        except OSError:
            return
        if changed != self._seen_at:
            names = {entry.name for entry in _entries(self._directory) if _length(entry.name)}
            with self._lock:
                self._seen_at = changed
                if not self._waiting_bytes:  # else some of the names are still to be written
                    self._names = names
                else:
                    self._names |= names

    def _used(self, names: Iterable[str]) -> None:
        now = time.time_ns()
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._directory / name, ns=(now, now))

    def _remove(self, name: str) -> None:
        with self._lock:
            self._names.discard(name)
        with contextlib.suppress(OSError):
            os.unlink(self._directory / name)

    def _files(self, tokens: np.ndarray) -> tuple[str, list[str]]:
        """Names of the state's file and of the blocks' files."""
        lengths = [*range(BLOCK_ROWS, len(tokens) + 1, BLOCK_ROWS), len(tokens)]
        digests = list(self._digests(tokens, lengths))
        state = self._name(_STATE, *digests.pop())
        return state, [self._name(_BLOCK, length, digest) for length, digest in digests]

    def _digests(self, tokens: np.ndarray, lengths: Sequence[int]) -> Iterable[tuple[int, str]]:
        """A digest of the first tokens for each of the lengths, which ascend."""
        digest = hashlib.blake2b(self.identity.encode(), digest_size=16)
        start = 0
        for length in lengths:
            digest.update(tokens[start:length].astype("<u4").tobytes())
            start = length
            yield length, digest.hexdigest()

    def _name(self, kind: str, length: int, digest: str) -> str:
        return f"{kind}-{length}-{digest}{_SUFFIX}"


@dataclass(frozen=True)
class _Job:
    """Something for the writer: a snapshot, or only a note that one is used."""

    tokens: np.ndarray
    size: int = 0
    state: str = ""
    layers: Sequence[mx.array] = ()
    blocks: dict[str, tuple[mx.array, int]] = field(default_factory=dict)


def _length(name: str) -> int:
    """The number of tokens in a file's name; 0 for files of others."""
    parts = name.removesuffix(_SUFFIX).split("-")
    known = name.endswith(_SUFFIX) and len(parts) == 3 and parts[0] in (_STATE, _BLOCK)
    return int(parts[1]) if known and parts[1].isdecimal() else 0


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _copy(array: mx.array) -> mx.array:
    """A copy of the bits: uint16 for bfloat16, uint32 for float32."""
    bits = array.view(mx.uint16 if array.dtype == mx.bfloat16 else mx.uint32)
    return bits + mx.zeros(1, bits.dtype)


def _as_float(array: mx.array) -> np.ndarray:
    bits = np.asarray(array)
    return bits.view(np.float32) if bits.dtype == np.uint32 else bits


def _to_device(array: np.ndarray) -> mx.array:
    """The inverse of `_copy`."""
    result = mx.array(array)
    return result.view(mx.bfloat16) if array.dtype == np.uint16 else result
