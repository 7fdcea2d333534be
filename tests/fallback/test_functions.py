"""The functions of MLX operations against the references of the kernels that they replace."""

from __future__ import annotations

import inspect

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import fallback
from lily_mlx.fallback import attention, deltanet, linear, mlp, moe, sampling
from lily_mlx.kernels import sampling as sampling_kernels
from lily_mlx.kernels.attention import TAIL_ROWS, KVCache
from lily_mlx.kernels.attention import reference as attention_reference
from lily_mlx.kernels.deltanet import reference as deltanet_reference
from lily_mlx.kernels.linear import reference as linear_reference
from lily_mlx.kernels.mlp import reference as mlp_reference
from lily_mlx.kernels.moe import reference as moe_reference
from lily_mlx.kernels.moe import route as kernel_route
from lily_mlx.kernels.moe import split_routing
from lily_mlx.kernels.sampling import Settings
from lily_mlx.kernels.sampling import reference as sampling_reference
from tests.kernels.attention import layer
from tests.kernels.attention.test_batch import Batch
from tests.kernels.deltanet.layer import arrays, random_layer
from tests.kernels.deltanet.test_short import batch_of, chunk
from tests.kernels.moe.experts import FORMATS, UNIFORM, Format, make_experts
from tests.kernels.moe.test_prefill import reference_routing
from tests.kernels.sampling.test_batch import GROUPS, Rows
from tests.support import assert_close, bf16, quantized, rng, round_bf16, to_numpy

EPS = 1e-6
NOT_QUANTISED = Format((16, 0), (16, 0), (16, 0), (16, 0))
ROUNDED, EXACT = 6e-3, 1e-4


@pytest.mark.parametrize("name", fallback.NAMES)
def test_signatures_agree(name):
    kernel, replacement = (inspect.signature(f(name)) for f in (fallback.kernel, fallback.replacement))
    assert list(kernel.parameters) == list(replacement.parameters)
    defaults = [[p.default for p in s.parameters.values()] for s in (kernel, replacement)]
    assert defaults[0] == defaults[1]


def test_every_public_function_of_the_kernels_has_one():
    from lily_mlx import kernels
    from lily_mlx.kernels import attention, deltanet, linear, mlp, moe, sampling  # noqa: F401

    launching = {
        f"{family}.{name}"
        for family in ("linear", "deltanet", "attention", "mlp", "moe", "sampling")
        for name in getattr(kernels, family).__all__
        if inspect.isfunction(getattr(getattr(kernels, family), name))
    }
    plain = {
        "attention.capacity_for",
        "attention.empty_cache",
        "attention.lay_out",
        "attention.make_work",
        "moe.join_routing",
        "moe.split_routing",
    }
    assert set(fallback.NAMES) == launching - plain


class TestMLP:
    @pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (16, 0)])
    def test_gate_and_up(self, bits, group):
        generator = rng(bits)
        gate, up = (quantized(generator, (70, 192), bits, group)[0] for _ in range(2))
        x, gain = bf16(generator.normal(size=(5, 192))), bf16(generator.uniform(0.5, 1.5, 192))
        want = mlp_reference.gate_up_chunk(to_numpy(x), gate, up)
        assert_close("chunk", mlp.gate_up_chunk(x, gate, up), want, ROUNDED)
        want = mlp_reference.gate_up_step(to_numpy(x[:1]), to_numpy(gain), gate, up, EPS)
        assert_close("step", mlp.gate_up_step(x[:1], gain, gate, up, EPS), want, 2 * ROUNDED)


class TestLinear:
    @pytest.mark.parametrize(
        ("bits", "group", "columns"),
        [(2, 32, 96), (3, 64, 128), (4, 64, 64), (5, 32, 160), (6, 128, 128), (8, 64, 320), (16, 0, 96)],
    )
    @pytest.mark.parametrize("rows", [1, 5, 33])
    def test_projections(self, bits, group, columns, rows):
        generator = rng(bits + rows)
        w, dense = quantized(generator, (rows, columns), bits, group)
        x, residual = bf16(generator.normal(size=(1, columns))), bf16(generator.normal(size=(1, rows)))
        gain = bf16(generator.uniform(0.5, 1.5, columns))
        want = linear_reference.norm_project(*arrays(x, gain), w, EPS)
        size = np.sqrt(np.square(dense).sum(1)).max() / max(np.abs(want).max(), 1e-30)
        assert_close("norm_project", linear.norm_project(x, gain, w, EPS, mx.float32), want, 2e-3 * max(size, 1))
        assert_close("bfloat16", linear.norm_project(x, gain, w, EPS), want, ROUNDED * max(size, 1))
        want = linear_reference.project_add(to_numpy(x), w, to_numpy(residual))
        assert_close("project_add", linear.project_add(x, w, residual), want, ROUNDED)

    def test_gated_norm_project_add_reads_only_z(self):
        generator = rng(1)
        w, _ = quantized(generator, (40, 128), 4, 64)
        proj = np.full((1, 300), np.nan)
        proj[:, 24:152] = 3 * generator.normal(size=128)
        y, residual = bf16(generator.normal(size=(1, 128))), bf16(generator.normal(size=(1, 40)))
        proj, gain = bf16(proj), bf16(generator.uniform(0.5, 1.5, 32))
        want = linear_reference.gated_norm_project_add(
            to_numpy(y), to_numpy(proj), 24, to_numpy(gain), w, to_numpy(residual), EPS
        )
        got = linear.gated_norm_project_add(y, proj, 24, gain, w, residual, EPS)
        assert_close("out", got, want, ROUNDED)

    @pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
    @pytest.mark.parametrize("has_residual", [False, True])
    def test_matmul_and_rms_norm(self, dtype, has_residual):
        generator = rng(2)
        w, _ = quantized(generator, (37, 96), 6, 32)
        x, residual = bf16(generator.normal(size=(9, 96))), bf16(generator.normal(size=(9, 37)))
        residual = residual if has_residual else None
        want = linear_reference.matmul(to_numpy(x), w, None if residual is None else to_numpy(residual))
        got = linear.matmul(x, w, residual, dtype)
        assert got.dtype == dtype
        assert_close("out", got, want, EXACT if dtype == mx.float32 else ROUNDED)
        gain = bf16(generator.uniform(0.5, 1.5, 96))
        norm = linear_reference.rms_norm(*arrays(x, gain), EPS)
        assert_close("norm", linear.rms_norm(x, gain, EPS), norm, ROUNDED)
        if not has_residual:
            out, normed = linear.norm_matmul(x, gain, w, EPS, dtype)
            assert out.dtype == dtype
            assert_close("normed", normed, norm, ROUNDED)
            want, _ = linear_reference.norm_matmul(*arrays(x, gain), w, EPS)
            assert_close("norm_matmul", out, want, ROUNDED)

    @pytest.mark.parametrize("bits", [4, 16])
    def test_embed_clamps(self, bits):
        generator = rng(3)
        w, dense = quantized(generator, (20, 64), bits, 32)
        got = linear.embed(mx.array([0, 19, 20, 2**32 - 1], mx.uint32), w)
        assert_close("rows", got, dense[[0, 19, 19, 19]], ROUNDED)


class TestDeltaNet:
    @pytest.mark.parametrize("heads", [(1, 2), (3, 3), (2, 8)], ids=str)
    @pytest.mark.parametrize("rows", [1, 2, 3, 17])
    def test_chunk(self, heads, rows):
        data = random_layer(rows, heads, rows)
        got = deltanet.prepare(data.proj, *data.convolution, data.shape)
        want = deltanet_reference.prepare(*arrays(data.proj, *data.convolution), data.shape)
        for name, ours, theirs in zip(("q", "k", "v", "decay", "beta", "conv"), got, want, strict=True):
            assert_close(name, ours, theirs, EXACT if ours.dtype == mx.float32 else ROUNDED)
        y, state = deltanet.scan(*got[:5], data.state, data.shape)
        want_y, want_state = deltanet_reference.scan(*arrays(*got[:5], data.state), data.shape)
        assert_close("y", y, want_y, ROUNDED)
        assert_close("state", state, want_state, EXACT)

    def test_step_is_a_chunk_of_one(self):
        data = random_layer(4, (2, 4), 1)
        y, conv, state = deltanet.step(data.proj, data.conv_state, data.state, *data.convolution[1:], data.shape)
        want = deltanet_reference.step(
            *arrays(data.proj, data.conv_state, data.state, *data.convolution[1:]), data.shape
        )
        for name, ours, theirs in zip(("y", "conv", "state"), (y, conv, state), want, strict=True):
            assert_close(name, ours, theirs, 1e-2)

    def test_batch_step(self):
        data, windows, states, gain = batch_of(5, (1, 2), 3)
        layer = *data.convolution[1:], gain
        got = deltanet.batch_step(data.proj, windows, states, *layer, data.shape, EPS)
        want = deltanet_reference.batch_step(*arrays(data.proj, windows, states, *layer), data.shape, EPS)
        for name, ours, theirs in zip(("out", "windows", "states"), got, want, strict=True):
            assert_close(name, ours, theirs, 1e-2)

    def test_short_chunk(self):
        data, gain = chunk(6, (1, 2), 17)
        arguments = data.proj, data.conv_state, data.state, *data.convolution[1:], gain
        got = deltanet.short_chunk(*arguments, data.shape, EPS)
        want = deltanet_reference.short_chunk(*arrays(*arguments), data.shape, EPS)
        for name, ours, theirs in zip(("out", "window", "state"), got, want, strict=True):
            assert_close(name, ours, theirs, 1e-2)

    def test_gated_norm(self):
        data = random_layer(5, (2, 4), 9, z_is_nan=False)
        generator = rng(5)
        y = bf16(generator.normal(size=(9, 512)))
        gain = bf16(generator.uniform(0.5, 1.5, 128))
        want = deltanet_reference.gated_norm(*arrays(y, data.proj, gain), data.shape, EPS)
        assert_close("out", deltanet.gated_norm(y, data.proj, gain, data.shape, EPS), want, ROUNDED)


class TestAttention:
    @pytest.mark.parametrize("position", [0, 1000, 131_072, 262_143])
    @pytest.mark.parametrize("rotary", [0, 34, 64])
    def test_prepare_is_exact_at_any_position(self, position, rotary):
        generator, shape = rng(position), layer.shape_of((4, 2), 64, rotary)
        proj, gains = layer.projection(generator, 5, shape), layer.norms(generator, shape)
        got = attention.prepare(proj, *gains, layer.position_of(position), shape, EPS)
        want = attention_reference.prepare(*arrays(proj, *gains), np.array([position]), shape, EPS)
        for name, ours, theirs in zip("qk", got, want, strict=True):
            assert_close(name, ours, theirs, ROUNDED)

    @pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 256, 300])
    def test_step(self, length):
        generator, shape = rng(length), layer.shape_of((4, 2), 64, 32)
        keys, values = layer.random_rows(generator, length, shape), layer.random_rows(generator, length, shape)
        cache, position = layer.cache_of(keys, values, shape), layer.position_of(length)
        proj, gains = layer.projection(generator, 1, shape), layer.norms(generator, shape)
        got, after = attention.step(proj, *gains, position, cache, shape, EPS)
        q, _ = attention.prepare(proj, *gains, position, shape, EPS)
        tail_keys, tail_values = after.tail_keys, after.tail_values
        row, old = length % TAIL_ROWS, length - length % TAIL_ROWS
        assert np.array_equal(to_numpy(tail_keys[:, :row]), keys[old:].transpose(1, 0, 2))
        new_keys = np.concatenate([keys, to_numpy(tail_keys[:, row])[None]])
        new_values = np.concatenate([values, to_numpy(tail_values[:, row])[None]])
        want_value = attention_reference.split_projection(to_numpy(proj), shape)[3][0]
        assert np.array_equal(new_values[-1], want_value)
        want = layer.attend(to_numpy(q), new_keys, new_values, length, proj, shape)
        assert_close("out", got, want, ROUNDED)

    def test_batch_step(self):
        batch = Batch([0, 127, 128, 300], layer.shape_of((4, 2), 64, 32), seed=6)
        arguments = (batch.proj, *batch.gains, batch.work, batch.cache, batch.shape, EPS)
        got, after = attention.batch_step(*arguments)
        want, want_after = fallback.kernel("attention.batch_step")(*arguments)
        assert_close("out", got, to_numpy(want), ROUNDED)
        for row, length in enumerate(batch.lengths):
            for ours, theirs in zip(vars(after).values(), vars(want_after).values(), strict=True):
                if ours is theirs:
                    continue  # the pools
                ours, theirs = (x[row][:, : length % TAIL_ROWS + 1] for x in (ours, theirs))
                assert_close(f"tail of {row}", ours, to_numpy(theirs), ROUNDED)

    @pytest.mark.parametrize("length", [0, 1, 127, 128, 200])
    @pytest.mark.parametrize("tokens", [1, 2, 130])
    def test_append(self, length, tokens):
        generator, shape = rng(length + tokens), layer.shape_of((2, 2), 32, 0)
        keys, values = layer.random_rows(generator, length, shape), layer.random_rows(generator, length, shape)
        proj = layer.projection(generator, tokens, shape)
        k = layer.random_rows(generator, tokens, shape)
        before = layer.cache_of(keys, values, shape)
        cache = attention.append(before, bf16(k), proj, layer.position_of(length), length, shape)
        got_keys, got_values = layer.rows_of(cache, length + tokens)
        new_values = attention_reference.split_projection(to_numpy(proj), shape)[3]
        assert np.array_equal(got_keys, np.concatenate([keys, k]))
        assert np.array_equal(got_values, np.concatenate([values, new_values]))
        kept = fallback.kernel("attention.append")(before, bf16(k), proj, layer.position_of(length), length, shape)
        assert [a.shape for a in vars(cache).values()] == [a.shape for a in vars(kept).values()]

    def test_a_traced_append_is_right_at_other_lengths(self):
        """A compiled chunk is used again at every length that completes as many blocks."""
        shape = layer.shape_of((2, 2), 32, 0)
        generator = rng(9)
        traced = {}
        for length in (3, 40, 100, 120):
            tokens = 20
            total = length + tokens
            keys, values = layer.random_rows(generator, length, shape), layer.random_rows(generator, length, shape)
            proj, k = layer.projection(generator, tokens, shape), layer.random_rows(generator, tokens, shape)
            completes = total // TAIL_ROWS > length // TAIL_ROWS

            def run(k, proj, position, *cache, length=length):
                return list(vars(attention.append(KVCache(*cache), k, proj, position, length, shape)).values())

            function = traced.setdefault(completes, mx.compile(run))
            before = layer.cache_of(keys, values, shape)
            cache = KVCache(*function(bf16(k), proj, layer.position_of(length), *vars(before).values()))
            got_keys, _ = layer.rows_of(cache, total)
            assert np.array_equal(got_keys, np.concatenate([keys, k])), length

    @pytest.mark.parametrize("length", [128, 384])
    def test_merge_tail(self, length):
        generator, shape = rng(length), layer.shape_of((2, 2), 32, 0)
        keys, values = layer.random_rows(generator, length, shape), layer.random_rows(generator, length, shape)
        main = layer.cache_of(keys[: length - 1], values[: length - 1], shape)
        tails = (bf16(rows[length - TAIL_ROWS :].transpose(1, 0, 2)) for rows in (keys, values))
        merged = attention.merge_tail(KVCache(main.keys, main.values, *tails), length)
        got_keys, got_values = layer.rows_of(merged, length)
        assert np.array_equal(got_keys, keys)
        assert np.array_equal(got_values, values)

    @pytest.mark.parametrize("length", [0, 5, 126, 128, 300])
    @pytest.mark.parametrize("block", [1 << 26, 5000], ids=["one-block", "many-blocks"])
    def test_prefill_attention(self, length, block, monkeypatch):
        monkeypatch.setattr(attention, "_MOST_SCORES", block)
        generator, shape, tokens = rng(length), layer.shape_of((6, 2), 64, 0), 11
        total = length + tokens
        keys, values = layer.random_rows(generator, total, shape), layer.random_rows(generator, total, shape)
        q = bf16(generator.normal(size=(tokens, 6, 64)))
        proj = layer.projection(generator, tokens, shape)
        got = attention.prefill_attention(
            q, layer.cache_of(keys, values, shape), layer.position_of(length), proj, shape
        )
        assert_close("out", got, layer.attend(to_numpy(q), keys, values, length, proj, shape), ROUNDED)


class TestMoE:
    @pytest.mark.parametrize("height", [None, 8, 64])
    @pytest.mark.parametrize("kind", ["normal", "ties", "one expert", "missing"])
    @pytest.mark.parametrize(("experts", "top_k", "tokens"), [(5, 2, 1), (33, 8, 40), (16, 16, 7)])
    def test_route_is_that_of_the_kernels(self, experts, top_k, tokens, kind, height):
        from tests.fuzz.test_moe import logits_of

        logits = logits_of(rng(experts), kind, tokens, experts)
        got, kernels = moe.route(logits, top_k, True, height), kernel_route(logits, top_k, True, height)
        want = moe_reference.route(to_numpy(logits), top_k, True)
        for name in ("experts", "offsets", "row_tokens", "slot_rows"):
            ours = getattr(got, name)
            assert ours.dtype == mx.uint32
            assert np.array_equal(to_numpy(ours), getattr(want, name)), name
        assert_close("scores", got.scores, want.scores, 1e-5)
        used = [np.array(r.blocks)[np.array(r.blocks)[:, 2] > 0] for r in (got, kernels)]
        assert np.array_equal(*used)
        assert (got.blocks.shape, got.tile_rows) == (kernels.blocks.shape, kernels.tile_rows)

    @pytest.mark.parametrize("normalise", [True, False])
    @pytest.mark.parametrize("formats", [UNIFORM, FORMATS[2], NOT_QUANTISED], ids=str)
    def test_one_token(self, formats, normalise):
        generator = rng(6)
        weights, dense = make_experts(generator, 6, 64, 128, formats)
        x, residual = (bf16(generator.normal(size=(1, 128))) for _ in range(2))
        gain, logits = bf16(generator.uniform(0.5, 1.5, 128)), mx.array(generator.normal(size=(1, 7)), mx.float32)
        got_hidden, routing = moe.experts_gate_up(x, gain, logits, weights, 3, EPS, normalise)
        got = (got_hidden, *split_routing(routing))
        want = moe_reference.experts_gate_up(*arrays(x, gain, logits), dense, 3, EPS, normalise)
        assert_close("hidden", got[0], want[0], 1e-2)
        assert np.array_equal(to_numpy(got[1]), want[1])
        assert_close("scores", got[2], want[2], 1e-5)
        out = moe.experts_down(got_hidden, routing, weights, residual)
        hidden, experts, scores = arrays(*got)
        assert_close(
            "out", out, moe_reference.experts_down(hidden, experts, scores, dense, to_numpy(residual)), ROUNDED
        )

    def test_chunk(self):
        generator = rng(7)
        weights, dense = make_experts(generator, 6, 64, 128, FORMATS[2])
        x, residual = (bf16(generator.normal(size=(13, 128))) for _ in range(2))
        routing = moe.route(mx.array(generator.normal(size=(13, 7)), mx.float32), 2, True)
        same = reference_routing(routing)
        hidden = moe.grouped_gate_up(x, routing, weights)
        assert_close("hidden", hidden, moe_reference.grouped_gate_up(to_numpy(x), same, dense), ROUNDED)
        outputs = moe.grouped_down(hidden, routing, weights)
        assert_close("outputs", outputs, moe_reference.grouped_down(to_numpy(hidden), same, dense), ROUNDED)
        out = moe.combine(outputs, routing, residual)
        assert_close("out", out, moe_reference.combine(to_numpy(outputs), same, to_numpy(residual)), ROUNDED)


class TestSampling:
    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    @pytest.mark.parametrize("vocabulary", [8, 255, 256, 700])
    def test_head_and_select(self, vocabulary, temperature):
        generator = rng(vocabulary)
        w, _ = quantized(generator, (vocabulary, 96), 4, 32)
        x, gain = bf16(generator.normal(size=(1, 96))), bf16(generator.uniform(0.5, 1.5, 96))
        parameters = mx.array([temperature, *[0.0] * 7])
        seed, position = mx.array([2**32 - 5], mx.uint32), mx.array([77], mx.int32)
        logits, value, index = sampling.head(x, gain, w, EPS, parameters, seed, position)
        want = sampling_reference.head(*arrays(x, gain), w, EPS, *map(np.array, (parameters, seed, position)))
        assert_close("logits", logits, want[0], 2e-3)
        token, following = sampling.select(value, index, position)
        assert int(following.item()) == 78
        assert int(token.item()) == int(sampling_reference.select(*want[1:], np.array([77]))[0][0])
        kernel_select = fallback.kernel("sampling.select")
        assert int(kernel_select(value, index, position)[0].item()) == int(token.item())

    def test_noise_is_that_of_the_reference(self):
        got = sampling._noise(mx.array([123], mx.uint32), mx.array([4567], mx.int32), 5000)
        assert_close("noise", got, sampling_reference.noise(123, 4567, 5000), 1e-4)

    @pytest.mark.parametrize("filtered", [True, False])
    @pytest.mark.parametrize("fed", [1, 3, 40])
    @pytest.mark.parametrize(
        "settings",
        [
            Settings(),
            Settings(temperature=0.7, repetition_penalty=1.3, repetition_context_size=5),
            Settings(presence_penalty=-0.5, frequency_penalty=0.25, frequency_context_size=32),
        ],
        ids=["none", "repetition", "presence-frequency"],
    )
    def test_adjust_is_that_of_the_kernel(self, settings, fed, filtered):
        generator = rng(fed)
        logits = mx.array(3 * generator.normal(size=(1, 700)), mx.float32)
        recent, tokens = (mx.array(generator.integers(0, 9, n).astype(np.uint32)) for n in (32, fed))
        recent[3] = sampling_kernels.NO_TOKEN
        ids = mx.array([5, 699, *[sampling_kernels.NO_TOKEN] * 6], mx.uint32)
        arguments = (
            logits, tokens, mx.array([77], mx.int32), recent, ids, mx.array([2.0, -float("inf"), *[9.0] * 6]),
            settings.array(), mx.array([3], mx.uint32), filtered,
        )  # fmt: skip
        got, want = sampling.adjust(*arguments), fallback.kernel("sampling.adjust")(*arguments)
        for name, ours, theirs in zip(("adjusted", "recent", "best", "index", "total"), got, want, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
            if name == "index" and filtered:
                continue  # `draw` does not read it
            ours, theirs = (np.nan_to_num(to_numpy(x), neginf=-99.0) for x in (ours, theirs))
            assert_close(name, ours, theirs, 1e-5)

    @pytest.mark.parametrize(
        "settings",
        [
            Settings(temperature=0.8, top_p=0.7),
            Settings(temperature=1.5, min_p=0.2, min_tokens_to_keep=3),
            Settings(temperature=1.0, top_k=7),
            Settings(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.05, top_k=9),
            Settings(temperature=1.0, top_p=0.9, min_p=0.01, xtc_probability=0.5, top_k=30),
        ],
        ids=["top-p", "min-p", "top-k", "xtc", "all"],
    )
    @pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
    def test_draw(self, settings, ties):
        for seed in range(6):
            generator = rng(seed)
            logits = 2 * generator.normal(size=(1, 300))
            logits = np.round(logits) if ties else logits
            special = np.array([int(logits.argmax()), *[sampling_kernels.NO_TOKEN] * 7], np.uint32)
            rest = (settings.array(), mx.array([seed], mx.uint32), mx.array([5], mx.int32))
            parts = mx.zeros(1)
            token, following, kept = sampling.draw(mx.array(logits, mx.float32), parts, parts, mx.array(special), *rest)
            want, _, keep = sampling_reference.draw(
                logits.astype(np.float32),
                None,
                None,
                special[:1].astype(np.int64),
                settings,
                np.array([seed]),
                np.array([5]),
            )
            lowest, last, highest = (x.item() for x in kept)
            values, ids = logits[0].astype(np.float32), np.arange(300)
            got = (values > lowest) | ((values == lowest) & (ids <= last))
            got &= (values <= highest) | np.isin(ids, special)
            assert np.array_equal(got, keep)
            assert (int(token.item()), int(following.item())) == (int(want[0]), 6)

    @pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
    def test_choose_rows(self, group):
        rows = Rows(group, 700, seed=11)
        inputs = (rows.logits, rows.tokens, rows.position, rows.recent)
        got = sampling.choose_rows(*map(mx.array, inputs), rows.controls())
        for ours, theirs in zip(got, rows.choose(), strict=True):
            assert_close("choice", ours, theirs, 1e-5)

    def test_ties_go_to_the_lower_id(self):
        value = mx.array([1.0, 3.0, float("nan"), 3.0, 3.0])
        index = mx.array([4, 9, 1, 2, 6], mx.uint32)
        token, _ = sampling.select(value, index, mx.array([0], mx.int32))
        assert int(token.item()) == 2


def test_rounding_helper_matches():
    """The tests above rely on bfloat16 inputs being exact."""
    values = rng(8).normal(size=100)
    assert np.array_equal(to_numpy(bf16(values)), round_bf16(values))
