"""The bundled checkpoint gives what mlx_lm gives, whatever the chunk size.

mlx_lm computes with float32 activations here. MLX's quantised matmul on the CPU sums bfloat16 activations in
bfloat16, which adds about 2 % of noise to every product (test_mlx_on_the_cpu_sums_bfloat16_in_bfloat16), ten times
the rounding of its result; our kernels, like MLX's on a GPU, sum in float32. The texts are from the part of its
corpus that the checkpoint was not trained on.
"""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import lily_mlx
from lily_mlx.checkpoints import bundled_checkpoint, held_out_text
from lily_mlx.engine import Engine, SequenceState, generate_tokens, make_sampling
from tests.support import round_bf16, to_numpy

WINDOW = 512  # positions of one comparison; every window starts a new sequence
MAX_LOGIT_ERROR = 0.02  # of the range of mlx_lm's logits
MIN_AGREEMENT = 0.99
SMALL_ROUTER_GAP = 0.01  # between the last chosen and the first other expert: rounding may swap the two
SMALL_GAP = 0.05  # between mlx_lm's best two logits, below which the choice is a matter of rounding
GREEDY = make_sampling()


@pytest.fixture(scope="module")
def ours():
    return lily_mlx.load(bundled_checkpoint())[0]


@pytest.fixture(scope="module")
def theirs():
    model, tokenizer = mlx_lm.load(str(bundled_checkpoint()))
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def held_out(theirs) -> list[int]:
    return theirs[1].encode(held_out_text(), add_special_tokens=False)


@pytest.fixture(scope="module")
def prompts(theirs) -> list[list[int]]:
    """10 prompts of plain text, of 3 to about 150 tokens, and 10 chats."""
    tokenizer = theirs[1]
    speeches = [s for s in held_out_text().split("\n\n") if s.strip()]
    plain = [
        tokenizer.encode("\n\n".join(speeches[8 * i : 8 * i + 1 + i // 3]), add_special_tokens=False)[: 3 + 16 * i]
        for i in range(10)
    ]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": speech[:80]}], add_generation_prompt=True, enable_thinking=i % 2 == 0
        )
        for i, speech in enumerate(speeches[100:110])
    ]
    return plain + chats


def their_logits(model, tokens: list[int]) -> np.ndarray:
    return to_numpy(model(mx.array(tokens)[None])[0])


def their_logits_and_router_gaps(model, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits at each position, and how far the router there is from another choice.

    That is the smallest distance, over the layers, between its logits of the last chosen expert and of the first one
    that is not chosen.
    """
    blocks = [layer.mlp for layer in model.layers]
    gates = [block.gate for block in blocks]
    seen: list[mx.array] = []
    try:
        for block, gate in zip(blocks, gates, strict=True):
            block.gate = recorded(gate, seen)
        logits = their_logits(model, tokens)
    finally:
        for block, gate in zip(blocks, gates, strict=True):
            block.gate = gate
    top_k = blocks[0].top_k
    ranked = [np.sort(to_numpy(router)[0], axis=-1)[:, ::-1] for router in seen]
    return logits, np.min([r[:, top_k - 1] - r[:, top_k] for r in ranked], axis=0)


def recorded(function, results: list[mx.array]):
    def call(x):
        results.append(function(x))
        return results[-1]

    return call


def gap(logits: np.ndarray) -> float:
    """Distance between the best two logits."""
    second, best = np.sort(logits)[-2:]
    return float(best - second)


def test_mlx_on_the_cpu_sums_bfloat16_in_bfloat16():
    """If this fails, MLX has become exact enough to compare with in bfloat16 too."""
    mx.random.seed(0)
    x, w = mx.random.normal((8, 256)).astype(mx.bfloat16), mx.random.normal((256, 256)).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(w, group_size=64, bits=4)
    exact = [x.astype(mx.float32), codes, scales.astype(mx.float32), biases.astype(mx.float32)]
    want = to_numpy(mx.quantized_matmul(*exact, group_size=64, bits=4))
    got = to_numpy(mx.quantized_matmul(x, codes, scales, biases, group_size=64, bits=4))
    error, rounding = ((v - want).std() / want.std() for v in (got, round_bf16(want)))
    print(f"MLX's error {error:.4f}, of rounding the result {rounding:.4f}")
    assert error > 5 * rounding


@pytest.mark.parametrize("index", range(20))
def test_greedy_tokens_equal_mlx_lms(ours, theirs, prompts, index):
    prompt, count = prompts[index], 64
    got = [token for token, _ in generate_tokens(Engine(ours), prompt, GREEDY, max_tokens=count)]
    steps = list(generate_step(mx.array(prompt), theirs[0], max_tokens=count))
    want = [token for token, _ in steps]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            distance = gap(to_numpy(steps[i][1]))
            print(f"prompt {index}: token {i} differs where mlx_lm's best two logits are {distance:.3f} apart")
            assert distance < SMALL_GAP
            break


@pytest.mark.parametrize("index", range(20))
def test_prompt_logits_are_mlx_lms(ours, theirs, prompts, index):
    want, router_gaps = their_logits_and_router_gaps(theirs[0], prompts[index])
    difference = np.abs(to_numpy(ours.logits(prompts[index])) - want).max(-1)
    error = difference / (want.max() - want.min())
    ties = router_gaps < SMALL_ROUTER_GAP
    print(
        f"prompt {index}: logits differ by {error[~ties].max():.4f} of their range, by "
        f"{error[ties].max(initial=0):.4f} at {ties.sum()} of {len(ties)} positions where experts tie"
    )
    assert error[~ties].max() < MAX_LOGIT_ERROR
    assert (error >= MAX_LOGIT_ERROR).sum() <= 1  # a tie that fell the other way


@pytest.mark.parametrize(
    "windows", [pytest.param(2, id="2-windows"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_top_token_agrees_with_mlx_lm_on_held_out_text(ours, theirs, held_out, windows):
    agree = total = 0
    for start in range(0, len(held_out), WINDOW)[:windows]:
        text = held_out[start : start + WINDOW]
        want = their_logits(theirs[0], text).argmax(-1)
        agree += int((to_numpy(ours.logits(text)).argmax(-1) == want).sum())
        total += len(text)
    print(f"{agree} of {total} positions agree")
    assert agree >= MIN_AGREEMENT * total


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(200, id="200-positions"),
        pytest.param(1024, id="1024-positions", marks=pytest.mark.slow),
    ],
)
def passage(request, ours, held_out):
    """A passage of held-out text and the best token at each position when it is one chunk."""
    text = held_out[: request.param]
    return text, to_numpy(ours.logits(text, chunk_size=4096)).argmax(-1)


@pytest.mark.parametrize("chunk_size", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 2048])
def test_chunk_size_does_not_change_the_top_token(ours, passage, chunk_size):
    text, want = passage
    got = to_numpy(ours.logits(text, chunk_size)).argmax(-1)
    assert_agreement(got, want)


def test_single_steps_do_not_change_the_top_token(ours, passage):
    text, want = passage
    engine = Engine(ours)
    state = engine.prefill(engine.empty(), text[:1], GREEDY)
    got = [int(state.token.item())]
    for token in text[1:]:
        forced = SequenceState(state.length, state.caches, mx.array([token], mx.uint32), state.position, None)
        state = engine.step(forced, GREEDY)
        got.append(int(state.token.item()))
    assert_agreement(np.array(got), want)


def assert_agreement(got: np.ndarray, want: np.ndarray) -> None:
    share = float((got == want).mean())
    print(f"the top token agrees at {share:.4%} of {len(want)} positions")
    assert share >= MIN_AGREEMENT
