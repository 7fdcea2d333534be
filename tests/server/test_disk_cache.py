"""The prefix cache on disk: what comes back, what is left out, and what must never harm a request."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from lily_mlx.server import cache_files, disk_cache
from lily_mlx.server.disk_cache import DiskCache
from lily_mlx.server.prefix_cache import PrefixCache
from tests.support import rng

from .states import BLOCK_BYTES, STATE_BYTES, made_state, same
from .support import wait_until


def tokens(count, seed=0):
    return [int(token) for token in rng(seed).integers(1, 300, count)]


class Process:
    """A prefix cache with a directory, as one server process has it."""

    def __init__(self, directory, max_bytes=10**9, memory=10**9, identity="model", snapshots=None):
        self.disk = DiskCache(directory, max_bytes, identity)
        self.cache = PrefixCache(memory, snapshots, self.disk)
        self.cache.start(made_state([]))

    def insert(self, text):
        self.cache.insert(text, made_state(text))

    def find(self, text):
        """The tokens that a prompt would not have to compute; what comes back is checked."""
        self.cache.fetch(text)
        found, _ = self.cache.longest(text)
        if found is None:
            return 0
        assert same(found.state(), made_state(text[: found.length]))
        return found.length

    def end(self):
        self.disk.close()
        assert not self.disk._thread.is_alive()


@pytest.fixture
def start(tmp_path):
    """Starts processes; all end with the test."""
    processes = []

    def start(name="cache", **options):
        processes.append(Process(tmp_path / name, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def save(start, text):
    """A process that has written a snapshot, and has ended."""
    process = start()
    process.insert(text)
    process.end()


def files(tmp_path, kind=""):
    return sorted(path for path in tmp_path.rglob(f"{kind}*.safetensors"))


def written(process, count):
    """Waits until the writer has done so much."""
    end = time.monotonic() + 20
    while process.disk.writes + process.disk.errors < count:
        assert time.monotonic() < end
        time.sleep(0.01)


TEXT = tokens(400)


def test_the_next_process_finds_what_the_last_one_had(start):
    first = start()
    first.insert(TEXT[:300])
    first.insert(TEXT[:200])
    first.end()
    second = start()
    assert second.find(TEXT) == 300
    assert second.find([*TEXT[:250], 1000]) == 200
    assert second.find(TEXT[:199]) == 0
    assert second.find([1000, *TEXT]) == 0
    assert (second.disk.reads, second.disk.errors) == (2, 0)


def test_what_is_in_memory_is_not_read(start):
    process = start()
    process.insert(TEXT[:300])
    written(process, 1)
    assert process.find(TEXT) == 300
    assert process.disk.reads == 0


def test_what_memory_has_lost_is_read(start):
    process = start()
    process.insert(TEXT[:300])
    written(process, 1)
    process.cache.clear()
    assert process.find(TEXT) == 300
    assert process.disk.reads == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({"memory": STATE_BYTES + 2 * BLOCK_BYTES}, 300, id="the-longest-fits"),
        pytest.param({"memory": STATE_BYTES + 2 * BLOCK_BYTES - 1}, 200, id="a-shorter-one-fits"),
        pytest.param({"memory": STATE_BYTES - 1}, 0, id="none-fits"),
        pytest.param({"memory": 0}, 0, id="no-memory"),
        pytest.param({"snapshots": 0}, 0, id="no-snapshots"),
    ],
)
def test_what_memory_cannot_hold_is_not_read(start, options, found):
    first = start()
    first.insert(TEXT[:300])
    first.insert(TEXT[:200])
    first.end()
    second = start(**options)
    assert second.find(TEXT) == found
    assert second.find(TEXT) == found
    assert second.disk.reads == (1 if found else 0)


def test_too_little_memory_for_any_snapshot_is_reported(start, caplog):
    with caplog.at_level(logging.WARNING, "lily_mlx"):
        start(memory=STATE_BYTES)
        assert not caplog.records
        start(memory=STATE_BYTES - 1)
    assert str(STATE_BYTES) in caplog.text
    assert "--prompt-cache-bytes" in caplog.text


def test_blocks_in_memory_are_not_read_again(start, monkeypatch):
    save(start, TEXT[:390])
    second = start()
    second.insert(TEXT[:260])
    read, names = disk_cache.read, []
    monkeypatch.setattr(disk_cache, "read", lambda path, identity: names.append(path.name) or read(path, identity))
    assert second.find(TEXT) == 390
    assert [name.rsplit("-", 1)[0] for name in names] == ["state-390", "block-384"]


def test_a_snapshot_shorter_than_the_common_beginning(start):
    """More blocks are known than the snapshot has."""
    first = start()
    first.insert(TEXT[:200])
    first.insert(TEXT[:390])
    first.end()
    second = start()
    assert second.find([*TEXT[:390], 7]) == 390
    for _ in range(2):
        assert second.find([*TEXT[:300], 1000]) == 200
    assert second.disk.reads == 2


def test_a_block_is_one_file_whatever_snapshots_share_it(start, tmp_path):
    process = start()
    for length in (400, 200, 300):
        process.insert(TEXT[:length])
    process.end()
    assert len(files(tmp_path, "block")) == 3
    assert len(files(tmp_path, "state")) == 3
    sizes = 3 * BLOCK_BYTES + 3 * STATE_BYTES
    assert sizes < sum(path.stat().st_size for path in files(tmp_path)) < sizes + 6 * 2000
    assert process.disk.bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_files_are_safetensors(start, tmp_path):
    process = start()
    process.insert(TEXT[:300])
    process.end()
    (state,) = files(tmp_path, "state")
    with safe_open(state, "numpy") as file:
        assert file.metadata()["format"] == cache_files.FORMAT
        assert file.get_tensor("tokens").tolist() == TEXT[:300]
    loaded = mx.load(str(files(tmp_path, "block")[0]))
    assert loaded["rows"].dtype == mx.bfloat16
    assert loaded["tokens"].tolist() == TEXT[:128]


def test_other_users_cannot_look_in(start, tmp_path):
    start()
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_other_users_cannot_look_in_below_an_open_directory(start, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    save(start, TEXT[:300])
    inside = list((tmp_path / "cache").rglob("*"))
    assert len(inside) == 4
    assert [path.name for path in inside if path.stat().st_mode & 0o077] == []


def test_other_users_cannot_look_into_a_directory_that_was_made_again(start, tmp_path):
    process = start()
    shutil.rmtree(tmp_path / "cache")
    process.insert(TEXT[:300])
    written(process, 1)
    assert process.disk.errors == 1
    wait_until(lambda: (tmp_path / "cache" / process.disk.identity).is_dir())
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache" / process.disk.identity).stat().st_mode & 0o077 == 0


def test_short_snapshots_are_not_worth_a_file(start, tmp_path):
    process = start()
    process.insert(TEXT[:127])
    process.end()
    assert files(tmp_path) == []


def test_another_model_finds_nothing(start):
    save(start, TEXT[:300])
    assert start(identity="another").find(TEXT) == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_identity(path):
    cache_files.write(path, {"tokens": np.zeros(3, np.uint32)}, "another")


def other_tokens(path):
    arrays = cache_files.read(path, identity := path.parent.name)
    cache_files.write(path, {**arrays, "tokens": arrays["tokens"] + np.uint32(1)}, identity)


def one_array_less(path):
    arrays = cache_files.read(path, identity := path.parent.name)
    arrays.pop(next(name for name in arrays if name != "tokens"))
    cache_files.write(path, arrays, identity)


def other_shape(path):
    arrays = cache_files.read(path, identity := path.parent.name)
    cache_files.write(path, {n: a if n == "tokens" else a[None] for n, a in arrays.items()}, identity)


DAMAGES = {
    "cut-off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut-off-in-the-header": lambda path: path.write_bytes(path.read_bytes()[:30]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "a-changed-bit": flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("hello " * 100),
    "huge-header": lambda path: path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:]),
    "no-object": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "of-another-model": other_identity,
    "other-tokens": other_tokens,
    "an-array-less": one_array_less,
    "other-shapes": other_shape,
}


@pytest.mark.parametrize("kind", ["state", "block"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_left_out_and_removed(start, tmp_path, caplog, kind, damage):
    first = start()
    first.insert(TEXT[:300])
    first.insert(TEXT[:200])
    first.end()
    name = {"state": "state-300", "block": "block-256"}[kind]
    (path,) = files(tmp_path, name)
    damage(path)
    second = start()
    with caplog.at_level(logging.WARNING, "lily_mlx"):
        assert second.find(TEXT) == 200  # the next best
    assert second.disk.errors == 1
    assert [path.name in record.getMessage() for record in caplog.records] == [True]
    assert not path.exists()
    second.insert(TEXT[:300])
    second.end()
    third = start()
    assert (third.find(TEXT), third.disk.errors) == (300, 0)


def test_a_missing_block_makes_the_state_useless(start, tmp_path):
    save(start, TEXT[:300])
    second = start()
    files(tmp_path, "block-128")[0].unlink()
    assert second.find(TEXT) == 0
    assert files(tmp_path, "state") == []
    assert second.disk.errors == 0


def test_the_budget_drops_what_was_not_used_for_longest(start, tmp_path):
    texts = [tokens(150, seed) for seed in range(4)]
    each = BLOCK_BYTES + STATE_BYTES + 2 * 1500
    process = start(max_bytes=3 * each)
    for count, text in enumerate(texts[:3], 1):
        process.insert(text)
        written(process, count)
        time.sleep(0.02)
    process.cache.clear()
    assert process.find([*texts[0], *tokens(200, 9)]) == 150  # in use again
    process.insert(texts[3])
    process.end()
    assert sum(path.stat().st_size for path in files(tmp_path)) == process.disk.bytes <= 3 * each
    last = start(max_bytes=3 * each)
    assert [last.find([*text, *tokens(200, 9)]) for text in texts] == [150, 0, 150, 150]


def test_a_smaller_budget_at_the_next_start(start, tmp_path):
    save(start, TEXT[:300])
    process = start(max_bytes=0)
    process.end()
    assert files(tmp_path) == []


def test_a_snapshot_larger_than_the_budget_is_not_written(start, tmp_path):
    process = start(max_bytes=1000)
    process.insert(TEXT[:300])
    process.end()
    assert files(tmp_path) == []
    assert process.disk.skipped == 1


def test_files_of_others_stay(start, tmp_path):
    (tmp_path / "cache" / "mine").mkdir(parents=True)
    own = [tmp_path / "cache" / "notes.txt", tmp_path / "cache" / "mine" / "model.safetensors"]
    for path in own:
        path.write_text("x" * 1000)
    old = tmp_path / "cache" / "mine" / ".state-1-a.safetensors.1.ab.partial"
    for path in (old, old.with_name(".state-2-b.safetensors.1.ab.partial")):
        path.write_text("")
    os.utime(old, (1, 1))
    process = start(max_bytes=0)
    process.end()
    assert all(path.exists() for path in own)
    assert [path.name[:8] for path in (tmp_path / "cache" / "mine").glob(".*")] == [".state-2"]


def broken_disk(monkeypatch, error):
    def write(*_):
        raise error

    monkeypatch.setattr(disk_cache, "write", write)


def test_a_full_disk(start, tmp_path, caplog, monkeypatch):
    process = start()
    with caplog.at_level(logging.INFO, "lily_mlx"):
        with monkeypatch.context() as patch:
            broken_disk(patch, OSError(28, "No space left on device"))
            process.insert(TEXT[:300])
            written(process, 1)
            process.insert(TEXT[:200])  # nothing is tried for a while
        assert (process.disk.errors, process.disk.skipped, process.disk.writes) == (1, 1, 0)
        assert process.find(TEXT) == 300
        process.disk._paused_until = 0
        process.insert(TEXT[:250])
        written(process, 2)
    assert process.disk.writes == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "No space left" in lines[0]
    assert "written again" in lines[1]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        cache_files.write(tmp_path / "x.safetensors", {"a": np.zeros(3, np.float32)}, "i")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_away(start, tmp_path):
    process = start()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("now a file")
    process.insert(TEXT[:300])
    written(process, 1)
    assert process.disk.errors == 1
    assert process.find(TEXT) == 300
    process.cache.clear()
    assert process.find(TEXT) == 0
    (tmp_path / "cache").unlink()
    process.disk._paused_until = 0
    process.insert(TEXT[:200])
    written(process, 2)
    process.disk._paused_until = 0
    process.insert(TEXT[:250])
    written(process, 3)
    assert files(tmp_path, "state")


def test_writing_does_not_hold_up_the_caller(start, monkeypatch):
    process, go = start(), threading.Event()
    write = disk_cache.write
    monkeypatch.setattr(disk_cache, "write", lambda *args: go.wait(20) and write(*args))
    begin = time.monotonic()
    process.insert(TEXT[:300])
    process.insert(TEXT[:200])
    assert process.find(TEXT) == 300
    assert time.monotonic() - begin < 5
    assert process.disk.writes == 0
    go.set()
    written(process, 2)


def test_what_waits_is_bounded(start, monkeypatch):
    process, go = start(), threading.Event()
    write = disk_cache.write
    monkeypatch.setattr(disk_cache, "write", lambda *args: go.wait(20) and write(*args))
    monkeypatch.setattr(disk_cache, "_MOST_WAITING", 3 * STATE_BYTES + 2 * BLOCK_BYTES)
    for length in range(130, 200, 10):
        process.insert(TEXT[:length])
    assert process.disk.skipped >= 3
    go.set()
    process.end()
    assert process.disk.writes + process.disk.skipped == 7


def test_one_snapshot_larger_than_all_that_may_wait(start, monkeypatch):
    process = start()
    monkeypatch.setattr(disk_cache, "_MOST_WAITING", 1000)
    process.insert(TEXT[:300])
    process.end()
    assert (process.disk.writes, process.disk.skipped) == (1, 0)


def test_two_servers_on_one_directory(start, tmp_path):
    """They write, read and make room at once: whatever is found is right, and nothing is reported damaged."""
    budget = 12 * (BLOCK_BYTES + STATE_BYTES)
    processes = [start(max_bytes=budget, memory=2 * STATE_BYTES + BLOCK_BYTES) for _ in range(2)]
    texts = [tokens(150 + 10 * i, i % 6) for i in range(24)]
    found = []

    def work(process, seed):
        for i in rng(seed).permutation(24).tolist() * 2:
            process.insert(texts[i])
            found.append(process.find([*texts[i], *tokens(200, 77)]))

    threads = [threading.Thread(target=work, args=(p, i)) for i, p in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(found) == 96
    for process in processes:
        process.end()
        assert process.disk.errors == 0
    assert not list(tmp_path.rglob("*.partial"))
    last = start(max_bytes=budget)
    last.end()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= budget
    assert len(files(tmp_path, "state")) > 3
