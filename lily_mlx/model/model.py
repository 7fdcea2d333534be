"""`Model`: a checkpoint's configuration and weights, ready to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from lily_mlx.kernels.attention import TAIL_ROWS, KVCache, Work, capacity_for
from lily_mlx.kernels.sampling import RowControls
from lily_mlx.metal import current_backend

from .batch import BatchOutput, Pool, RowMemory, batch_step
from .cache import LayerCache, empty_caches
from .checkpoint import OnPacked, load_weights
from .choice import Sampling
from .config import ModelConfig, read_config
from .decode import StepOutput, decode_step
from .prefill import all_logits, choose_token, prefill_chunk
from .weights import ModelWeights, arrays_of, form_of, with_arrays

MOST_COMPILED_ROWS = 256  # longer chunks keep the device busy while the host prepares their launches
MOST_COMPILED_CHUNKS = 64  # of different rows, capacities and samplings; the one not used for longest makes room
MOST_COMPILED_BATCHES = 48  # steps of several sequences: of different numbers of them, lengths and samplings
LAYERS_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model. Holds no sequence, so any number of sequences can share it."""

    config: ModelConfig
    weights: ModelWeights
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _compiled_chunks: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _compiled_batches: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, directory: Path) -> Model:
        """Reads a checkpoint directory in MLX format.

        Raises:
            FileNotFoundError: `config.json` or a weight file is missing.
            ValueError: the checkpoint is of another family, corrupt or not supported.
        """
        config = ModelConfig.from_dict(read_config(directory))
        return cls(config, load_weights(directory, config))

    @classmethod
    def from_arrays(
        cls,
        settings: Mapping[str, Any],
        arrays: Iterable[tuple[str, mx.array]],
        on_packed: OnPacked | None = None,
    ) -> Model:
        """A model from tensors in memory.

        The kernels read copies. Each tensor is let go when its layer is done, so tensors that an iterator makes and
        nothing else holds do not stay beside the copies.

        Args:
            settings: the contents of config.json.
            arrays: tensors with their names in an MLX checkpoint.
            on_packed: see `lily_mlx.model.checkpoint.load_weights`.

        Raises:
            ValueError: see `load`.
        """
        config = ModelConfig.from_dict(dict(settings))
        return cls(config, load_weights(Path("memory"), config, arrays, on_packed))

    @property
    def arrays(self) -> list[mx.array]:
        """All weight arrays."""
        return arrays_of(self.weights)

    def forget_compiled(self) -> None:
        """Steps and chunks are traced again, with the kernels that are in use then."""
        self._compiled.clear()
        self._compiled_chunks.clear()
        self._compiled_batches.clear()

    def step(
        self,
        token: mx.array,
        position: mx.array,
        caches: tuple[LayerCache, ...],
        sampling: Sampling,
        recent: mx.array | None = None,
    ) -> StepOutput:
        """`decode_step` on the current backend.

        On `metal` and `cuda` it goes through `mx.compile`, which replays the launches without Python. Caches
        grow in buckets, so that the step is traced again only when a bucket is full. On `cpu` kernels run
        when they are called.
        """
        backend = current_backend()
        if backend == "cpu":
            return decode_step(self.weights, self.config, token, position, caches, sampling, recent)
        memory = sampling.recent_or_empty(recent)
        key = f"{backend} {sampling.form}"
        if key not in self._compiled:
            self._compiled[key] = self._compile(sampling, memory, caches)
        arrays = [token, position, *arrays_of((sampling, memory, caches))]
        token, position, logits, *rest = self._compiled[key](*arrays)
        return StepOutput(token, position, logits, *with_arrays((caches, memory), rest))

    def batch_step(
        self,
        tokens: mx.array,
        positions: mx.array,
        work: Work,
        pools: tuple[Pool, ...],
        memories: tuple[RowMemory, ...],
        recent: mx.array,
        controls: RowControls,
    ) -> BatchOutput:
        """`batch_step` on the current backend, through `mx.compile` on `metal` and `cuda`.

        It is traced once for each number of sequences, size of the list of items, size of the pools and form of the
        choice; the traces that were not used for longest make room for others.
        """
        backend, inputs = current_backend(), (positions, work, pools, memories, recent, controls)
        if backend == "cpu":
            return batch_step(self.weights, self.config, tokens, *inputs)
        pages = pools[0].keys.shape[0] if pools else 0
        lists = (recent, controls.bias_ids, controls.special_tokens)
        sizes = (tokens.size, work.items.shape[0], pages, *(array.shape[1] for array in lists))
        key = f"{backend} {sizes} {controls.filtered}"
        compiled = self._compiled_batches.pop(key, None) or self._compile_batch(inputs)
        _keep(self._compiled_batches, key, compiled, MOST_COMPILED_BATCHES)
        chosen, logits, recent, *rest = compiled(tokens, *arrays_of(inputs))
        return BatchOutput(chosen, logits, recent, with_arrays(memories, rest))

    def _compile_batch(self, inputs: tuple[Any, ...]) -> Any:
        like = form_of(inputs)

        def step(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
            output = batch_step(self.weights, self.config, tokens, *with_arrays(like, arrays))
            return [output.tokens, output.logits, output.recent, *arrays_of(output.memories)]

        return mx.compile(step)

    def prefill_chunk(
        self, tokens: Sequence[int], length: int, caches: tuple[LayerCache, ...], last: mx.array | None = None
    ) -> tuple[mx.array, tuple[LayerCache, ...]]:
        """`prefill_chunk` on the current backend; a device that works ahead gets the work layer by layer."""
        every = 0 if current_backend() == "cpu" else LAYERS_AT_ONCE
        chunk = mx.array(tokens, mx.uint32)
        return prefill_chunk(self.weights, self.config, chunk, length, caches, last=last, submit_every=every)

    def prefill(
        self,
        tokens: Sequence[int],
        length: int,
        caches: tuple[LayerCache, ...],
        sampling: Sampling,
        fed: Sequence[int] = (),
        recent: mx.array | None = None,
    ) -> StepOutput:
        """`prefill_chunk` and `choose_token` on the current backend.

        Short chunks go through `mx.compile` on `metal` and `cuda`, once for each number of rows and cache capacity,
        because the host would take longer to prepare their launches than the device to run them. Long chunks are
        handed to the device some layers at a time.

        Args:
            tokens: token ids of the chunk.
            length: tokens that the caches hold.
            sampling: how the token after the chunk is chosen.
            fed: the last tokens of the text, the chunk's included, for a sampling with filters or penalties; those of
                the chunk if empty.
            recent: the tokens before `fed`, where the sampling has penalties.
        """
        rows, backend = len(tokens), current_backend()
        ends = mx.array(fed if len(fed) else tokens, mx.uint32)
        total = length + rows
        last = mx.array([total - 1], mx.int32)
        if backend == "cpu" or rows > MOST_COMPILED_ROWS:
            x, caches = self.prefill_chunk(tokens, length, caches, last)
            return choose_token(self.weights, self.config, x, total, caches, sampling, last, ends, recent)
        chunk = mx.array(tokens, mx.uint32)
        # What the launches depend on besides the rows: whether a block of rows is completed, the capacity that holds
        # it, and that of the cache that comes in, for which `length` stands in the trace.
        completed = total - total % TAIL_ROWS
        capacity = capacity_for(completed) if completed > length - length % TAIL_ROWS else 0
        memory = sampling.recent_or_empty(recent)
        room = next((cache.capacity for cache in caches if isinstance(cache, KVCache)), 0)
        key = f"{backend} {rows} {room} {capacity} {sampling.form}"
        compiled = self._compiled_chunks.pop(key, None) or self._compile_chunk(rows, length, sampling, memory, caches)
        _keep(self._compiled_chunks, key, compiled, MOST_COMPILED_CHUNKS)
        position = mx.array([length], mx.int32)
        arrays = [chunk, position, last, ends, *arrays_of((sampling, memory, caches))]
        token, position, logits, *rest = compiled(*arrays)
        return StepOutput(token, position, logits, *with_arrays((caches, memory), rest))

    def _compile_chunk(
        self,
        rows: int,
        length: int,
        sampling: Sampling,
        recent: mx.array | None,
        caches: tuple[LayerCache, ...],
    ) -> Any:
        like = form_of((sampling, recent, caches))

        def chunk(
            tokens: mx.array, position: mx.array, last: mx.array, fed: mx.array, *arrays: mx.array
        ) -> list[mx.array]:
            sampling, recent, caches = with_arrays(like, arrays)
            x, caches = prefill_chunk(self.weights, self.config, tokens, length, caches, position, last)
            output = choose_token(self.weights, self.config, x, length + rows, caches, sampling, last, fed, recent)
            return [output.token, output.position, output.logits, *arrays_of((output.caches, output.recent))]

        return mx.compile(chunk)

    def _compile(self, sampling: Sampling, recent: mx.array | None, caches: tuple[LayerCache, ...]) -> Any:
        like = form_of((sampling, recent, caches))

        def step(token: mx.array, position: mx.array, *arrays: mx.array) -> list[mx.array]:
            sampling, recent, caches = with_arrays(like, arrays)
            output = decode_step(self.weights, self.config, token, position, caches, sampling, recent)
            return [output.token, output.position, output.logits, *arrays_of((output.caches, output.recent))]

        return mx.compile(step)

    def logits(self, tokens: Sequence[int], chunk_size: int = 2048) -> mx.array:
        """Logits at every position of a known text, by the prefill kernels.

        Args:
            tokens: token ids of the text.
            chunk_size: tokens that go through the layers at once.

        Returns:
            float32 [len(tokens), V]; row i holds the logits of the token after tokens[i].
        """
        caches, rows = empty_caches(self.config), []
        for start in range(0, len(tokens), chunk_size):
            chunk = mx.array(tokens[start : start + chunk_size], mx.uint32)
            x, caches = prefill_chunk(self.weights, self.config, chunk, start, caches)
            rows.append(all_logits(self.weights, self.config, x))
            mx.eval(rows[-1], *arrays_of(caches))
        return mx.concatenate(rows)


def _keep(compiled: dict[str, Any], key: str, function: Any, most: int) -> None:
    """Puts a compiled function last, and forgets the first one if there are too many."""
    compiled[key] = function
    if len(compiled) > most:
        del compiled[next(iter(compiled))]
