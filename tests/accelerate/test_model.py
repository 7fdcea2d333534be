"""`accelerate`: the model object that mlx_lm's tools call."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from lily_mlx import accelerate
from tests.model import synthetic

from .conftest import random_model, tokens


def test_is_the_same_kind_of_model(original, fast):
    assert isinstance(fast, type(original))
    assert fast is not original
    assert not hasattr(original, "lily_model")
    assert len(fast.layers) == len(original.layers)
    assert fast.args is original.args
    theirs, ours = dict(tree_flatten(original.parameters())), dict(tree_flatten(fast.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)


def test_shares_the_experts_arrays(original, fast):
    theirs = original.layers[0].mlp.switch_mlp.gate_proj.weight
    assert fast.lily_model.weights.layers[0].moe.experts.gate.weight is theirs


def test_large_weights_are_in_memory_once():
    """Ours are copies, so that the model's own arrays have to go."""
    model = random_model()
    mx.eval(model.parameters())
    values = {name: mx.array(array) for name, array in tree_flatten(model.parameters())}
    mx.eval(values)
    before = mx.get_active_memory()
    fast = accelerate(model)
    mx.eval(fast.parameters())
    grown = mx.get_active_memory() - before
    layers = fast.lily_model.weights.layers
    own = [layer.mixer.in_proj.packed.nbytes + layer.moe.router.packed.nbytes for layer in layers]
    packed = sum(array.nbytes for array in fast.lily_model.arrays)
    print(f"{grown} bytes more, {sum(own)} of them joined; {packed} bytes of weights")
    assert grown <= sum(own) + 0.05 * packed  # a second copy of all weights would be 1.0
    for name, array in tree_flatten(model.parameters()):
        assert mx.array_equal(array, values[name]), name


@pytest.mark.parametrize(
    ("changes", "encodings"),
    [({"tie_word_embeddings": True}, {}), ({}, {"lm_head": (8, 64)}), ({}, {"lm_head": (6, 64), "o_proj": (8, 32)})],
    ids=["tied", "wider-head", "several-encodings"],
)
def test_weights_of_several_encodings(changes, encodings, close):
    settings = synthetic.config(num_experts_per_tok=8, **changes)
    model, exact = (synthetic.random_model(settings, encodings=encodings)[0] for _ in range(2))
    exact.set_dtype(mx.float32)
    fast = accelerate(model)
    assert type(fast).__name__ == f"Accelerated{type(exact).__name__}"
    inputs = mx.array([tokens(7)])
    close(fast(inputs), exact(inputs))


def test_accelerating_twice_changes_nothing(fast):
    assert accelerate(fast) is fast


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 300])
def test_logits_without_a_cache(fast, exact, close, count):
    inputs = mx.array([tokens(count)])
    logits = fast(inputs)
    assert logits.dtype == mx.float32
    close(logits, exact(inputs))


@pytest.mark.parametrize("calls", [[97, 1, 1], [1, 1, 96], [126, 1, 1, 1], [3, 125, 5], [128, 128, 1]], ids=str)
def test_logits_with_a_cache(fast, exact, close, calls):
    ids, cache, rows, start = tokens(sum(calls)), make_prompt_cache(fast), [], 0
    for count in calls:
        rows.append(fast(mx.array([ids[start : start + count]]), cache=cache))
        start += count
    close(mx.concatenate(rows, axis=1), exact(mx.array([ids])))
    assert cache[-1].offset == len(ids)


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64], ids=str)
def test_kinds_of_token_ids(fast, dtype):
    ids = mx.array([tokens(5)])
    assert mx.array_equal(fast(ids.astype(dtype)), fast(ids))


def test_rows_of_a_batch_are_what_they_are_alone(fast):
    ids = mx.array([tokens(7, seed) for seed in range(3)])
    cache = make_prompt_cache(fast)
    together = [fast(ids, cache=cache), fast(ids[:, :1], cache=cache)]
    for row in range(3):
        alone = make_prompt_cache(fast)
        for logits, part in zip(together, (ids, ids[:, :1]), strict=True):
            assert mx.array_equal(logits[row : row + 1], fast(part[row : row + 1], cache=alone))


@pytest.mark.parametrize("lengths", [[10, 26], [12, 3, 1, 26, 10, 2, 64, 5]], ids=["two", "eight"])  # C87
def test_batch_generate_equals_solo_runs(fast, tokenizer, lengths):
    prompts = [tokens(count, seed) for seed, count in enumerate(lengths)]
    limits = [3 + seed % 4 for seed in range(len(prompts))]
    together = batch_generate(fast, tokenizer, prompts, max_tokens=limits, return_token_ids=True)
    for prompt, limit, got in zip(prompts, limits, together.token_ids, strict=True):
        alone = [r.token for r in stream_generate(fast, tokenizer, prompt, max_tokens=limit)]
        assert got == [token for token in alone if token not in tokenizer.eos_token_ids]


@pytest.mark.parametrize("steps", [1, 16, 2048])
def test_batches_prefilled_in_steps(fast, tokenizer, steps):
    prompts = [tokens(count, count) for count in (33, 5, 17)]
    options = {"max_tokens": 4, "return_token_ids": True}
    got = batch_generate(fast, tokenizer, prompts, prefill_step_size=steps, **options)
    assert got.token_ids == batch_generate(fast, tokenizer, prompts, **options).token_ids


def test_perplexity_of_mlx_lm(fast, exact):
    from mlx_lm.perplexity import eval_ppl

    data = mx.array([tokens(20, seed) for seed in range(3)])
    got, want = (eval_ppl(model, data, batch_size=2)[0] for model in (fast, exact))
    assert got == pytest.approx(want, rel=2e-2)


def test_total_parameters_of_mlx_lm(original, fast):
    from mlx_lm.utils import get_total_parameters

    assert get_total_parameters(fast) == get_total_parameters(original)


def test_training_uses_mlx_lms_layers(fast, original):
    inputs = mx.array([tokens(4)])
    fast.train()
    try:
        logits = fast(inputs)
    finally:
        fast.eval()
    assert mx.allclose(logits, original(inputs), atol=0.5)
    assert logits.dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda m: m(mx.array([1, 2])), "give integers", id="one-dimension"),
        pytest.param(lambda m: m(mx.array([[1.0]])), "give integers", id="floats"),
        pytest.param(lambda m: m(mx.array([[1, 320]])), "token id 320", id="id-too-high"),
        pytest.param(lambda m: m(mx.array([[1, -1]])), "token id -1", id="negative-id"),
        pytest.param(lambda m: m(mx.array([[1]]), cache=[KVCache()]), "has 1 layers", id="layers"),
        pytest.param(lambda m: m(mx.array([[1]]), cache=[KVCache() for _ in range(4)]), "layer 0", id="kind"),
        pytest.param(
            lambda m: m(mx.array([[1]]), input_embeddings=mx.zeros((1, 1, 128))), "embeddings", id="embeddings"
        ),
        pytest.param(lambda m: m.update({}), "change them first", id="update"),
        pytest.param(
            lambda m: m.load_weights([("x", mx.zeros(1))], strict=False), "change them first", id="load-weights"
        ),
        pytest.param(lambda m: m.shard(), "one device", id="shard"),
    ],
)
def test_refuses(fast, call, words):
    with pytest.raises(ValueError, match=words):
        call(fast)


def test_speculative_decoding_is_refused_as_mlx_lm_does(fast, tokenizer):
    with pytest.raises(ValueError, match="trimmable prompt cache"):
        list(stream_generate(fast, tokenizer, [1, 2], draft_model=fast))


def other_family():
    from mlx_lm.models.llama import Model, ModelArgs

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    return Model(ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=320, **sizes))


def other_head_size():
    from mlx_lm.models.qwen3_5_moe import Model, ModelArgs

    settings = {**synthetic.TINY, "linear_key_head_dim": 96}
    return Model(ModelArgs.from_dict({**settings, "text_config": settings}))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(other_family, "another family", id="llama"),
        pytest.param(other_head_size, "key_dim 96", id="head-size"),
    ],
)
def test_other_models_stay_as_they_are_after_one_notice(caplog, make, reason):
    model = make()
    assert accelerate(model) is model
    (notice,) = [record.message for record in caplog.records if record.name == "lily_mlx"]
    assert notice.startswith("this model runs on mlx_lm's own path: ")
    assert reason in notice


@pytest.mark.parametrize("keys", [["linear_attn.out_proj", "mlp.switch_mlp.up_proj"], None], ids=["some", "all"])
def test_lora_adapters_are_fused(caplog, keys, close):
    model = random_model()
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    mx.random.seed(1)
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.02 * mx.random.normal(module.lora_b.shape)
    model.eval()
    inputs = mx.array([tokens(9)])
    got = accelerate(model)(inputs)
    assert "are fused into the weights" in caplog.text

    fused = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    from mlx.utils import tree_unflatten

    plain = random_model()
    plain.update_modules(tree_unflatten(fused))
    plain.set_dtype(mx.float32)
    close(got, plain(inputs))
    assert not mx.allclose(got, accelerate(random_model())(inputs), atol=0.5)


def test_load_fuses_adapters(tmp_path, caplog):
    from lily_mlx import load
    from tests.model.tokenizer import write_tokenizer

    write_tokenizer(tmp_path / "model")
    synthetic.write_checkpoint(tmp_path / "model", synthetic.config(num_experts_per_tok=8))
    model = random_model()
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["linear_attn.out_proj"]}
    linear_to_lora_layers(model, 4, settings)
    mx.random.seed(1)
    adapters = {
        name: 0.02 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    model.load_weights(list(adapters.items()), strict=False)
    model.eval()
    (tmp_path / "adapter").mkdir()
    mx.save_safetensors(str(tmp_path / "adapter" / "adapters.safetensors"), adapters)
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": settings}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    loaded, _ = load(tmp_path / "model", adapter_path=str(tmp_path / "adapter"))
    inputs = mx.array([tokens(6)])
    assert mx.array_equal(loaded(inputs), accelerate(model)(inputs))
    assert isinstance(model, nn.Module)


def test_a_loaded_model_takes_mlx_lms_calls(tmp_path):
    from lily_mlx import load
    from tests.model.tokenizer import write_tokenizer

    write_tokenizer(tmp_path)
    synthetic.write_checkpoint(tmp_path, synthetic.config())
    model, tokenizer = load(tmp_path)
    ids = tokens(12)
    want = [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=6)]
    import lily_mlx

    assert [r.token for r in lily_mlx.stream_generate(model, tokenizer, ids, max_tokens=6)] == want
    assert (len(model.layers), model.args.vocab_size, model.model_type) == (4, 320, "qwen3_5_moe")
