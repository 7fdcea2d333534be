"""The checkpoint loader: the joined layout, and a clear error for each way in which one is broken."""

from __future__ import annotations

import json
import logging

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.model import Model, arrays_of, with_arrays
from lily_mlx.model.weights import AttentionWeights, DeltaNetWeights
from tests.support import to_numpy

from . import synthetic
from .test_quantization import dense

GATE = "language_model.model.layers.0.mlp.gate"
LAYER = "language_model.model.layers.0"


@pytest.fixture
def checkpoint(tmp_path):
    return synthetic.write_checkpoint(tmp_path / "model", synthetic.config())


def part(tensors: dict[str, mx.array], path: str, bits: int = 4, group_size: int = 64) -> np.ndarray:
    path = f"language_model.{path}"
    return dense(
        QuantizedWeight.pack(*(tensors[f"{path}.{p}"] for p in ("weight", "scales", "biases")), bits, group_size)
    )


def change(directory, edit) -> None:
    tensors = synthetic.read_tensors(directory)
    edit(tensors)
    synthetic.write_tensors(directory, tensors)


def change_config(directory, edit) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def same_weights(a: Model, b: Model) -> bool:
    return all(mx.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


def test_joined_layout(checkpoint):
    tensors, weights = synthetic.read_tensors(checkpoint), Model.load(checkpoint).weights
    mixer = weights.layers[0].mixer
    assert isinstance(mixer, DeltaNetWeights)
    rows = [part(tensors, f"model.layers.0.linear_attn.in_proj_{p}") for p in ("qkv", "z", "b", "a")]
    assert np.array_equal(dense(mixer.in_proj), np.concatenate(rows))
    conv = to_numpy(tensors[f"{LAYER}.linear_attn.conv1d.weight"])
    assert np.array_equal(to_numpy(mixer.conv), conv[:, :, 0].T)
    assert (mixer.a_log.dtype, mixer.dt_bias.dtype) == (mx.float32, mx.float32)

    mixer = weights.layers[3].mixer
    assert isinstance(mixer, AttentionWeights)
    rows = [part(tensors, f"model.layers.3.self_attn.{p}_proj") for p in ("q", "k", "v")]
    assert np.array_equal(dense(mixer.in_proj), np.concatenate(rows))

    moe = weights.layers[1].moe
    rows = [part(tensors, f"model.layers.1.mlp.{p}", bits=8) for p in ("gate", "shared_expert_gate")]
    assert np.array_equal(dense(moe.router), np.concatenate(rows))
    down = part(tensors, "model.layers.1.mlp.switch_mlp.down_proj")
    assert np.array_equal(dense(moe.experts.down), down)
    assert np.array_equal(dense(weights.head), part(tensors, "lm_head"))


def test_shards_load_alike(tmp_path, checkpoint):
    sharded = synthetic.write_checkpoint(tmp_path / "sharded", synthetic.config(), shards=3)
    assert same_weights(Model.load(sharded), Model.load(checkpoint))


def test_arrays_in_memory_load_alike(checkpoint):
    settings = json.loads((checkpoint / "config.json").read_text())
    model = Model.from_arrays(settings, synthetic.read_tensors(checkpoint).items())
    assert same_weights(model, Model.load(checkpoint))


def test_tied_head_is_the_embedding(tmp_path):
    model = Model.load(synthetic.write_checkpoint(tmp_path, synthetic.config(tie_word_embeddings=True)))
    assert model.weights.head is model.weights.embedding


def test_unlike_parts_are_joined_exactly(tmp_path):
    encodings = {"in_proj_z": (6, 32), "v_proj": (8, 64), "layers.1.mlp.switch_mlp.up_proj": (5, 64)}
    directory = synthetic.write_checkpoint(tmp_path, synthetic.config(), encodings=encodings)
    tensors, weights = synthetic.read_tensors(directory), Model.load(directory).weights
    joined = weights.layers[0].mixer.in_proj
    assert (joined.bits, joined.group_size) == (6, 32)
    z = part(tensors, "model.layers.0.linear_attn.in_proj_z", 6, 32)
    qkv = part(tensors, "model.layers.0.linear_attn.in_proj_qkv")
    assert np.array_equal(dense(joined)[: len(qkv) + len(z)], np.concatenate([qkv, z]))
    assert weights.layers[1].moe.experts.gate.bits == 5


def test_peak_memory_is_the_weights_and_one_layer(tmp_path):
    settings = synthetic.config(num_hidden_layers=12, num_experts=32)
    directory = synthetic.write_checkpoint(tmp_path, settings)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = Model.load(directory)
    peak = mx.get_peak_memory() - before
    weights = sum(array.nbytes for array in model.arrays)
    largest = max(sum(array.nbytes for array in arrays_of(layer)) for layer in model.weights.layers)
    print(f"weights {weights}, largest layer {largest}, peak {peak}")
    assert weights <= peak <= weights + largest + 100_000


def test_arrays_can_be_replaced(checkpoint):
    weights = Model.load(checkpoint).weights
    arrays = arrays_of(weights)
    again = with_arrays(weights, arrays)
    assert again == weights
    assert len(arrays) == len(arrays_of(again))


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.blocks.0.weight",
        "model.visual.blocks.0.weight",
        "model.vision_tower.blocks.0.weight",
        "visual.blocks.0.weight",
        "model.language_model.visual.blocks.0.weight",
        "mtp.layers.0.weight",
        "language_model.mtp.layers.0.weight",
    ],
)
def test_ignores_vision_and_mtp_tensors(checkpoint, name, caplog):
    want = Model.load(checkpoint)
    change(checkpoint, lambda tensors: tensors.update({name: mx.zeros(3)}))
    with caplog.at_level(logging.WARNING, "lily_mlx"):
        got = Model.load(checkpoint)
    assert same_weights(got, want)
    assert len(caplog.records) == 1
    assert "ignored 1 tensors" in caplog.text


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_reads_other_prefixes(checkpoint, prefix):
    want = Model.load(checkpoint)
    old = "language_model.model."

    def rename(tensors):
        for name in [n for n in tensors if n.startswith(old)]:
            tensors[prefix + name.removeprefix(old)] = tensors.pop(name)

    change(checkpoint, rename)
    assert same_weights(Model.load(checkpoint), want)


class TestQuantisationOverrides:
    """Bits follow from the shapes; what config.json says about a layer must agree."""

    @pytest.mark.parametrize(
        "edit",
        [
            pytest.param(lambda q: None, id="right"),
            pytest.param(lambda q: q.pop(GATE), id="absent"),
            pytest.param(
                lambda q: q.update({"model.language_model.layers.0.mlp.gate": q.pop(GATE)}), id="other-prefix"
            ),
        ],
    )
    def test_real_bits_follow_from_shapes(self, checkpoint, edit):
        change_config(checkpoint, lambda config: edit(config["quantization"]))
        router = Model.load(checkpoint).weights.layers[0].moe.router
        assert (router.bits, router.group_size) == (8, 64)

    @pytest.mark.parametrize("wrong", [{"bits": 8}, {"bits": 7}, {"bits": "four"}, {"group_size": 128}], ids=str)
    def test_a_wrong_default_is_an_error(self, checkpoint, wrong):
        change_config(checkpoint, lambda config: config["quantization"].update(wrong))
        with pytest.raises(ValueError, match="but the shapes of most weights say 4 bits in groups of 64"):
            Model.load(checkpoint)

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            pytest.param({"bits": 4, "group_size": 64}, "4 bits in groups of 64", id="wrong-bits"),
            pytest.param({"bits": 8, "group_size": 32}, "8 bits in groups of 32", id="wrong-group"),
            pytest.param(False, "not quantised", id="false"),
        ],
    )
    def test_disagreement_is_an_error(self, checkpoint, override, words):
        change_config(checkpoint, lambda config: config["quantization"].update({GATE: override}))
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate") as error:
            Model.load(checkpoint)
        assert words in str(error.value)


class TestBrokenCheckpoints:
    """Each is reported before memory is filled, with the file or tensor and what to do."""

    def test_missing_shard_is_named(self, tmp_path):
        directory = synthetic.write_checkpoint(tmp_path, synthetic.config(), shards=2)
        (directory / "model-00002-of-00002.safetensors").unlink()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
            Model.load(directory)
        assert mx.get_peak_memory() - before < 100_000

    def test_no_weights(self, checkpoint):
        (checkpoint / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"no model\*\.safetensors"):
            Model.load(checkpoint)

    @pytest.mark.parametrize("keep", [0, 5, 1000, -1], ids=["empty", "in-length", "in-header", "last-byte"])
    def test_truncated_shard(self, checkpoint, keep):
        path = checkpoint / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            Model.load(checkpoint)

    def test_broken_index(self, tmp_path):
        directory = synthetic.write_checkpoint(tmp_path, synthetic.config(), shards=2)
        (directory / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ValueError, match="not a safetensors index"):
            Model.load(directory)

    def test_names_every_missing_unexpected_and_misshapen_tensor(self, checkpoint):
        def edit(tensors):
            del tensors[f"{LAYER}.mlp.gate.scales"]
            del tensors[f"{LAYER}.input_layernorm.weight"]
            tensors[f"{LAYER}.mlp.gate.bias"] = mx.zeros(8)
            tensors[f"{LAYER}.linear_attn.A_log"] = mx.zeros(3)

        change(checkpoint, edit)
        with pytest.raises(ValueError, match="do not fit") as error:
            Model.load(checkpoint)
        for words in (
            "missing tensor layers.0.mlp.gate.scales",
            "missing tensor layers.0.input_layernorm.weight [128]",
            "unexpected tensor language_model.model.layers.0.mlp.gate.bias [8]",
            "tensor layers.0.linear_attn.A_log has shape [3], expected [2]",
        ):
            assert words in str(error.value)

    def test_wrong_head_size(self, checkpoint):
        change_config(checkpoint, lambda config: config.update(head_dim=128))
        with pytest.raises(
            ValueError, match=r"layers\.3\.self_attn\.q_norm\.weight has shape \[256\], expected \[128\]"
        ):
            Model.load(checkpoint)

    def test_bits_that_no_encoding_has(self, checkpoint):
        name = f"{LAYER}.linear_attn.out_proj.weight"
        change(checkpoint, lambda tensors: tensors.update({name: tensors[name][:, :28]}))
        with pytest.raises(ValueError, match=r"layers\.0\.linear_attn\.out_proj .* do not encode"):
            Model.load(checkpoint)

    def test_unquantised_layer_that_the_config_says_is_quantised(self, checkpoint):
        def edit(tensors):
            for p in ("scales", "biases"):
                del tensors[f"{LAYER}.mlp.gate.{p}"]
            tensors[f"{LAYER}.mlp.gate.weight"] = mx.zeros((8, 128), mx.bfloat16)

        change(checkpoint, edit)
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate is quantised, but it has no scales"):
            Model.load(checkpoint)

    def test_unquantised_layer_of_another_shape(self, checkpoint):
        def edit(tensors):
            for p in ("scales", "biases"):
                del tensors[f"{LAYER}.mlp.gate.{p}"]
            tensors[f"{LAYER}.mlp.gate.weight"] = mx.zeros((8, 64), mx.bfloat16)

        change(checkpoint, edit)
        change_config(checkpoint, lambda config: config["quantization"].pop(GATE))
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate\.weight has shape \[8, 64\], expected \[8, 128\]"):
            Model.load(checkpoint)

    def test_quantised_without_a_word_in_the_config(self, checkpoint):
        change_config(checkpoint, lambda config: config.pop("quantization"))
        with pytest.raises(ValueError, match=r"no quantization, but \d+ weights are quantised"):
            Model.load(checkpoint)

    def test_one_name_twice(self, checkpoint):
        change(checkpoint, lambda t: t.update({"model.norm.weight": t["language_model.model.norm.weight"]}))
        with pytest.raises(ValueError, match="repeats"):
            Model.load(checkpoint)
