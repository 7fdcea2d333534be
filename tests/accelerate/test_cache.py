"""Caches of accelerated models: mlx_lm's protocol, its files, and what they refuse."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm import generate, stream_generate
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from lily_mlx.accelerate.cache import ArraysCache, BatchKVCache, KVCache

from .conftest import tokens


def filled(model, ids):
    cache = make_prompt_cache(model)
    if ids:
        model(mx.array([ids]), cache=cache)
    return cache


def greedy(model, cache, first, count):
    """Tokens that the model chooses one by one, and their logits."""
    chosen, rows, token = [], [], first
    for _ in range(count):
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        token = int(mx.argmax(rows[-1]).item())
        chosen.append(token)
    return chosen, mx.stack(rows)


def assert_same_state(got, want):
    for ours, theirs in zip(got, want, strict=True):
        flat, other = ([a for a in mlx_lm_cache.tree_flatten(c.state)] for c in (ours, theirs))
        assert [name for name, _ in flat] == [name for name, _ in other]
        for (_, a), (_, b) in zip(flat, other, strict=True):
            if isinstance(a, mx.array):
                assert a.dtype == b.dtype
                assert mx.array_equal(a, b)
            else:
                assert a == b


def test_layers(fast):
    cache = make_prompt_cache(fast)
    assert [type(layer) for layer in cache] == [ArraysCache] * 3 + [KVCache]
    assert all(layer.empty() for layer in cache)
    assert isinstance(cache[0], mlx_lm_cache.ArraysCache)
    assert isinstance(cache[3], mlx_lm_cache.KVCache)
    assert (cache[3].offset, cache[3].size(), sum(layer.nbytes for layer in cache)) == (0, 0, 0)


@pytest.mark.parametrize("count", [1, 3, pytest.param(96, marks=pytest.mark.slow), 128, 130])
def test_state_has_mlx_lms_layout(fast, exact, count):
    ids = tokens(count)
    ours, theirs = filled(fast, ids), filled(exact, ids)
    theirs[3].keys, theirs[3].values = theirs[3].keys_and_values()  # without unused rows
    for got, want in zip(ours, theirs, strict=True):
        flat, other = ([x for _, x in mlx_lm_cache.tree_flatten(c.state)] for c in (got, want))
        for a, b in zip(flat, other, strict=True):
            if isinstance(a, mx.array):
                assert a.shape == b.shape
                assert mx.abs(a - b).max() <= 3e-2 * mx.abs(b).max()
            else:
                assert a == b
    conv, state = ours[0].cache
    assert (conv.shape, state.dtype, ours[3].offset) == ((1, 3, 512), mx.float32, count)


@pytest.mark.parametrize("count", [0, 1, 3, 96, 128, 130])
def test_saved_and_loaded_states_are_equal(fast, tmp_path, count):  # C81
    ids = tokens(count)
    cache = filled(fast, ids)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"note": "x"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"note": "x"}
    assert [type(layer) for layer in loaded] == [mlx_lm_cache.ArraysCache] * 3 + [mlx_lm_cache.KVCache]
    got, want = greedy(fast, loaded, 5, 20), greedy(fast, cache, 5, 20)
    assert got[0] == want[0]
    assert mx.array_equal(got[1], want[1])
    assert_same_state(loaded, cache)


@pytest.mark.parametrize("count", [1, 96, 130])
def test_mlx_lms_model_continues_our_file_and_we_its(fast, original, exact, tmp_path, close, count):  # C81
    ids, rest = tokens(count), tokens(6, 1)
    want = exact(mx.array([ids + rest]))[:, count:]
    for writer, reader in ((fast, original), (original, fast)):
        file = str(tmp_path / "cache.safetensors")
        save_prompt_cache(file, filled(writer, ids))
        close(reader(mx.array([rest]), cache=load_prompt_cache(file)), want)


def test_a_quantised_cache_of_mlx_lm_is_read(fast, original, exact, close):  # C83
    ids, rest = tokens(40), tokens(3, 1)
    cache = filled(original, ids)
    cache[3] = cache[3].to_quantized(group_size=64, bits=8)
    close(fast(mx.array([rest]), cache=cache), exact(mx.array([ids + rest]))[:, 40:])
    assert type(cache[3]) is KVCache


def test_kv_bits_are_refused(fast, tokenizer):  # C83
    with pytest.raises(ValueError, match=r"kv_bits=8: the attention kernels .* leave kv_bits out"):
        generate(fast, tokenizer, [1, 2, 3], kv_bits=8, quantized_kv_start=0, max_tokens=2)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_are_references_and_independent(fast, how):
    cache = filled(fast, tokens(130))
    snapshot = [how(layer) for layer in cache]
    assert snapshot[0].rows[0] is cache[0].rows[0]
    assert snapshot[3].rows[0].keys is cache[3].rows[0].keys
    want = greedy(fast, copy.deepcopy(cache), 7, 4)[0]
    greedy(fast, cache, 9, 3)
    assert (snapshot[3].offset, cache[3].offset) == (130, 133)
    assert greedy(fast, snapshot, 7, 4)[0] == want


def test_trimming_is_refused_with_the_remedy(fast):
    cache = filled(fast, tokens(10))
    assert not can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 3) == 0
    assert cache[0].trim(0) == 0
    with pytest.raises(ValueError, match="cannot go back 3 tokens: copy the cache"):
        cache[0].trim(3)


@pytest.mark.parametrize(("count", "n"), [(10, 3), (130, 1), (130, 2), (130, 5), (300, 299), (5, 9)])
def test_an_attention_layer_alone_can_be_trimmed(fast, count, n):
    layer = filled(fast, tokens(count))[3]
    keys, values = layer.keys, layer.values
    assert layer.trim(n) == min(n, count)
    left = max(count - n, 0)
    assert layer.offset == left
    if left:
        assert mx.array_equal(layer.keys, keys[:, :, :left])
        assert mx.array_equal(layer.values, values[:, :, :left])
    else:
        assert layer.empty()


def test_layers_trimmed_apart_are_refused(fast):
    cache = filled(fast, tokens(4))
    cache[3].trim(4)
    with pytest.raises(ValueError, match=r"trim or reset all layers"):
        fast(mx.array([[1]]), cache=cache)


def test_mlx_lms_layers_cannot_write(fast):
    cache = filled(fast, tokens(4))
    with pytest.raises(TypeError, match="immutable"):
        fast.language_model(mx.array([[1]]), cache=cache)


def test_bytes_are_those_of_the_buffers(fast):
    cache = filled(fast, tokens(300))
    conv, state = 3 * 512 * 2, 2 * 128 * 128 * 4
    assert cache[0].nbytes == conv + state
    assert cache[3].nbytes == 2 * (256 + 128) * 256 * 2
    batch = cache[3].merge([cache[3], cache[3]])
    assert batch.nbytes == cache[3].nbytes  # shared


def test_batches_merge_extend_filter_and_extract(fast):
    caches = [filled(fast, tokens(count, count)) for count in (5, 130, 0)]
    batch = [caches[0][i].merge([cache[i] for cache in caches]) for i in range(4)]
    assert type(batch[3]) is BatchKVCache
    assert batch[3].offset.tolist() == [5, 130, 0]
    assert batch[3].left_padding.tolist() == [125, 0, 130]
    got = fast(mx.array([[1], [2], [3]]), cache=batch)
    for row, cache in enumerate(caches):
        assert mx.array_equal(got[row], fast(mx.array([[row + 1]]), cache=copy.deepcopy(cache))[0])
    more = [layer.merge([layer]) for layer in filled(fast, tokens(2))]
    for layer, other in zip(batch, more, strict=True):
        layer.extend(other)
        layer.filter([3, 1])
    assert batch[3].offset.tolist() == [2, 131]
    alone = [layer.extract(1) for layer in batch]
    assert (type(alone[3]), alone[3].offset) == (KVCache, 131)
    assert alone[0].rows[0] is batch[0].rows[1]


@pytest.mark.parametrize("kind", ["ours", "mlx_lm"])
def test_padding_on_the_left(fast, kind):
    prompts = [tokens(3, 3), tokens(7, 7), tokens(1, 1)]
    padding = [7 - len(prompt) for prompt in prompts]
    inputs = mx.array([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    if kind == "ours":
        empty = [make_prompt_cache(fast) for _ in prompts]
        cache = [empty[0][i].merge([c[i] for c in empty]) for i in range(4)]
        for layer in cache:
            layer.prepare(left_padding=padding)
    else:
        cache = [mlx_lm_cache.ArraysCache(2, left_padding=padding) for _ in range(3)]
        cache.append(mlx_lm_cache.BatchKVCache(padding))
    logits = mx.concatenate([fast(inputs[:, :4], cache=cache), fast(inputs[:, 4:], cache=cache)], axis=1)
    for row, prompt in enumerate(prompts):
        alone, start = make_prompt_cache(fast), padding[row]
        want = [
            fast(mx.array([part]), cache=alone)
            for part in (prompt[: max(4 - start, 0)], prompt[max(4 - start, 0) :])
            if part
        ]
        assert mx.array_equal(logits[row, start:], mx.concatenate(want, axis=1)[0])
        assert not logits[row, :start].any()
    assert cache[3].offset.tolist() == [3, 7, 1]


def test_mlx_lms_batch_continues(fast, original, exact, close):
    prompts = [tokens(3, 3), tokens(7, 7)]
    caches = [filled(original, prompt) for prompt in prompts]
    batch = [caches[0][i].merge([cache[i] for cache in caches]) for i in range(4)]
    logits = fast(mx.array([[1], [2]]), cache=batch)
    for row, prompt in enumerate(prompts):
        close(logits[row], exact(mx.array([[*prompt, row + 1]]))[0, -1:])


def test_the_prefix_cache_of_mlx_lms_server(fast):  # C79
    lru, key = LRUPromptCache(), "model"
    a, b, c = tokens(12, 1), tokens(5, 2), tokens(6, 3)
    lru.insert_cache(key, a, filled(fast, a))
    lru.insert_cache(key, a + b + c, filled(fast, a + b + c))
    prompt = [*a, *tokens(5, 4), *c]
    cache, rest = lru.fetch_nearest_cache(key, prompt)
    assert rest == prompt[len(a) :]  # the longer entry cannot go back, the shorter one is right
    want = filled(fast, a)
    assert mx.array_equal(fast(mx.array([rest]), cache=cache), fast(mx.array([rest]), cache=want))
    cache, rest = lru.fetch_nearest_cache(key, a + b + c)
    assert (rest, cache[3].offset) == ([], 23)
    assert lru.fetch_nearest_cache(key, [a[0], 1])[0] is None


@pytest.mark.parametrize("engine", ["mlx_lm", "lily_mlx"])
def test_a_cache_continues_where_a_generation_was_broken_off(fast, tokenizer, engine):  # C85
    import lily_mlx

    stream = stream_generate if engine == "mlx_lm" else lily_mlx.stream_generate
    prompt, more = tokens(9), tokens(4, 1)
    cache, first = make_prompt_cache(fast), []
    for response in stream(fast, tokenizer, prompt, prompt_cache=cache, max_tokens=50):
        first.append(response.token)
        if len(first) == 3:
            break
    del response
    assert cache[3].offset == len(prompt) + 3
    got = [r.token for r in stream(fast, tokenizer, more, prompt_cache=cache, max_tokens=6)]
    want = [r.token for r in stream(fast, tokenizer, prompt + first + more, max_tokens=6)]
    assert got == want
    assert cache[3].offset == len(prompt) + 3 + len(more) + len(got)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: [mlx_lm_cache.RotatingKVCache(8)] * 4, "layer 0 .*RotatingKVCache", id="rotating"),
        pytest.param(
            lambda: [mlx_lm_cache.ArraysCache(2)] * 3 + [mlx_lm_cache.RotatingKVCache(8)],
            "layer 3 .*RotatingKVCache where an attention layer",
            id="rotating-attention",
        ),
        pytest.param(lambda: [mlx_lm_cache.ArraysCache(3)] * 4, "of two arrays", id="three-arrays"),
    ],
)
def test_refuses_other_caches(fast, make, words):
    with pytest.raises(ValueError, match=words):
        fast(mx.array([[1]]), cache=make())


def test_refuses_another_number_of_sequences(fast):
    with pytest.raises(ValueError, match="holds 1 sequences, but the call has 2"):
        fast(mx.array([[1], [2]]), cache=filled(fast, tokens(3)))
