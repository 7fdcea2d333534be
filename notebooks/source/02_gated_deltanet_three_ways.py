# %% [markdown]
# # Gated DeltaNet three ways
#
# Three of four layers of Qwen3.6 do not attend to a cache. They keep one matrix $S$ for each head, 128 x 128 numbers,
# whatever the length of the text. For each token the matrix fades by $\alpha_t$, is asked what it holds under
# the key $k_t$, and is corrected towards the value $v_t$ with strength $\beta_t$:
#
# $$S_t = \alpha_t S_{t-1} + \beta_t\,(v_t - \alpha_t S_{t-1} k_t)\,k_t^\top, \qquad y_t = S_t\, q_t .$$
#
# The same numbers can be computed in three ways: token by token from memory, token by token from registers, and in
# chunks by matrix products. This notebook computes all three on real activations of the bundled checkpoint, shows that
# they agree, counts the bytes of state that each moves, and watches how rounding grows with the length.

# %%
import numpy as np
from lib import *

use_cpu()
model = tiny_model()
config = model.config
shape = config.deltanet
print(shape)

# %% [markdown]
# ## Real inputs
#
# Layer 0 of the checkpoint, fed with held-out text. `prepare` is the kernel that runs between the projection and the
# scan: a convolution over four tokens, SiLU, unit length for q and k, and the two gates.

# %%
from lily_mlx.kernels import deltanet
from lily_mlx.kernels.linear import embed, matmul, rms_norm

layer = model.weights.layers[0].mixer
tokens = mx.array(held_out_tokens(512), mx.uint32)
x = embed(tokens, model.weights.embedding)
proj = matmul(rms_norm(x, layer.in_norm, config.norm_eps), layer.in_proj)
empty_window = mx.zeros((shape.conv_kernel - 1, shape.channels), mx.bfloat16)
q, k, v, decay, beta, _ = deltanet.prepare(proj, empty_window, layer.conv, layer.a_log, layer.dt_bias, shape)
empty_state = mx.zeros((shape.value_heads, shape.value_dim, shape.key_dim), mx.float32)

fig, axes = plt.subplots(1, 2, figsize=(9, 3))
for head in range(shape.value_heads):
    axes[0].hist(to_numpy(decay)[:, head], bins=60, range=(0, 1), histtype="step", label=f"head {head}")
    axes[1].hist(to_numpy(beta)[:, head], bins=60, range=(0, 1), histtype="step")
axes[0].set(xlabel="decay of a token", ylabel="tokens", yscale="log")
axes[1].set(xlabel="beta of a token", ylabel="tokens", yscale="log")
axes[0].legend(fontsize=9)
plt.tight_layout()

# %% [markdown]
# A head whose decay stays near 1 remembers for long; one whose decay is small forgets within a few tokens.
#
# ## One: the recurrence
#
# The definition, in float64, as the kernels' `reference.py` has it. It is what the other two are held against.

# %%
from lily_mlx.kernels.deltanet import reference

inputs = [to_numpy(a) for a in (q, k, v, decay, beta, empty_state)]
y_exact, state_exact = reference.scan(*inputs, shape)
print("y", y_exact.shape, " state", state_exact.shape)

# %% [markdown]
# ## Two: the scan in registers
#
# Look at one row $s$ of $S$ (the state of one value dimension; the article calls it a column). Its new value needs
# $k_t$, $q_t$, the two gates, one number of $v_t$, and *its own* old value. It never needs another row:

# %%
head, rows = 2, slice(5, 6)
key_head = head // (shape.value_heads // shape.key_heads)
s = np.zeros((1, shape.key_dim))
alone = []
for t in range(len(tokens)):
    s = s * inputs[3][t, head]
    s = (
        s
        + inputs[4][t, head] * (inputs[2][t, head, rows] - s @ inputs[1][t, key_head])[:, None] * inputs[1][t, key_head]
    )
    alone.append((s @ inputs[0][t, key_head]).item())
print(
    "one row on its own against the whole:",
    relative_error(alone, y_exact.reshape(-1, shape.value_heads, shape.value_dim)[:, head, 5]),
)

# %% [markdown]
# So a few lanes can own one row, load it once, keep it in registers for the whole chunk, and write it once. Nothing is
# shared between simdgroups: no threadgroup memory and no barrier. Two sums over 128 keys are left for each token,
# and the lanes of a row do them by shuffles. The Metal text that does this is short enough to read here:

# %%
text = (ROOT / "lily_mlx/kernels/deltanet/scan.metal").read_text()
print(text[: text.index("constexpr")])
helper = (ROOT / "lily_mlx/kernels/deltanet/deltanet.h").read_text()
begin = helper.rindex("template", 0, helper.index(" delta_rule("))
print(helper[begin : helper.index("\n}", begin) + 2])

# %% [markdown]
# The same text runs here, compiled by the machine's C++ compiler:

# %%
y_scan, state_scan = deltanet.scan(q, k, v, decay, beta, empty_state, shape)
print(f"y     (bfloat16): {relative_error(y_scan, y_exact):.1e} of the largest value")
print(f"state (float32):  {relative_error(state_scan, state_exact):.1e}")

# %% [markdown]
# bfloat16 has 8 bits of precision, so 2e-3 is the rounding of `y` itself. The state, in float32, is right to its last digits.
#
# ## Three: in chunks
#
# Write $g_t = \alpha_1 \cdots \alpha_t$ inside a chunk of $C$ tokens and let $d_t$ be the correction of token $t$.
# Unrolling the recurrence from the state $S_0$ before the chunk gives
#
# $$S_t = g_t S_0 + \sum_{i \le t} \frac{g_t}{g_i}\, d_i k_i^\top, \qquad
#   d_t = \beta_t \Big(v_t - g_t S_0 k_t - \sum_{i<t} \frac{g_t}{g_i} (k_i \cdot k_t)\, d_i \Big).$$
#
# The $d_t$ are the solution of a small triangular system, and everything else is a matrix product. GPUs like matrix
# products. The price: the ratios $g_t / g_i$ must be taken as differences of logarithms (a product of decays underflows
# where its ratio does not), and the state leaves the chip between two chunks.


# %%
def chunked(q, k, v, decay, beta, state, size, dtype=np.float64):
    """The delta rule in chunks of `size` tokens; arrays as for reference.scan."""
    q, k, v, decay, beta, state = (a.astype(dtype) for a in (q, k, v, decay, beta, state))
    state, y = state.copy(), np.empty(v.shape, dtype)
    for start in range(0, len(q), size):
        part = slice(start, min(start + size, len(q)))
        for head in range(shape.value_heads):
            key_head = head // (shape.value_heads // shape.key_heads)
            Q, K, V = q[part, key_head], k[part, key_head], v[part, head]
            b, log_g = beta[part, head, None], np.cumsum(np.log(decay[part, head]))
            ratio = np.tril(np.exp(np.minimum(log_g[:, None] - log_g[None, :], 0)))  # g_t / g_i for i <= t
            g = np.exp(log_g)[:, None]
            system = np.eye(len(Q), dtype=dtype) + b * np.tril(ratio * (K @ K.T), -1)
            D = np.linalg.solve(system, b * (V - g * (K @ state[head].T)))
            y[part, head] = g * (Q @ state[head].T) + (ratio * (Q @ K.T)) @ D
            state[head] = g[-1] * state[head] + (ratio[-1][:, None] * D).T @ K
    return y.reshape(len(q), -1), state


table(
    ["chunk", "y, float64", "state, float64", "y, float32", "state, float32"],
    [
        [size]
        + [
            relative_error(a, b)
            for dtype in (np.float64, np.float32)
            for a, b in zip(chunked(*inputs, size, dtype), (y_exact, state_exact), strict=True)
        ]
        for size in (1, 16, 64, 256)
    ],
)

# %% [markdown]
# All three agree: the chunked form is the same function, and in float64 the same to 14 digits.
#
# ## Bytes of state
#
# What differs is traffic. For one layer of Qwen3.6-35B-A3B the state is 32 heads x 128 x 128 x 4 bytes = 2 MiB:

# %%
MIB = 2**20
state_bytes = 32 * 128 * 128 * 4


def traffic(tokens, tokens_between_visits_to_memory):
    """Bytes of state read and written: once each for every visit."""
    visits = -(-tokens // tokens_between_visits_to_memory)
    return 2 * visits * state_bytes / MIB


lengths = 2 ** np.arange(0, 14)
for label, size, colour in (
    ("recurrence from memory", 1, RED),
    ("chunks of 16", 16, ORANGE),
    ("chunks of 64", 64, PURPLE),
):
    plt.plot(lengths, [traffic(n, size) for n in lengths], "o-", color=colour, label=label, markersize=3)
plt.plot(lengths, [traffic(n, n) for n in lengths], "s-", color=BLUE, label="scan in registers", markersize=3)
plt.gca().set(xscale="log", yscale="log", xlabel="tokens of the chunk of the prompt", ylabel="MiB of state, one layer")
plt.xscale("log", base=2)
plt.legend()
table(
    ["2,048 tokens, one layer", "MiB"],
    [
        ["recurrence", traffic(2048, 1)],
        ["chunks of 16", traffic(2048, 16)],
        ["chunks of 64", traffic(2048, 64)],
        ["registers", traffic(2048, 2048)],
    ],
)

# %% [markdown]
# The article reports 256 MiB for the chunked scan that it replaced, and 5.6 % more prefill speed from the change on an M5 Max.
# That figure is the article's; nothing of it was measured here. Decode has one token at a time, so there all three move
# 4 MiB a layer and token, and the step kernel moves no more.
#
# ## Rounding, and what the state must be kept in
#
# How far does each form drift from the exact result as the text gets longer? The scan kernel's float32 state,
# the chunked form in float32, and, to see why the state is not kept in bfloat16, the recurrence with the state rounded to
# bfloat16 after each token. Longer text here is the held-out text of the checkpoint, in the layer's real numbers.

# %%
from lily_mlx.kernels.linear.reference import round_bfloat16


def bfloat16_state(q, k, v, decay, beta, state, stops):
    """The recurrence, all heads at once, with the state rounded to bfloat16 after each token; states at `stops`."""
    heads = np.arange(shape.value_heads) // (shape.value_heads // shape.key_heads)
    state, kept = state.copy(), {}
    for t in range(max(stops)):
        memory = state * decay[t][:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", memory, k[t, heads]))
        state = round_bfloat16(memory + delta[:, :, None] * k[t, heads][:, None, :])
        if t + 1 in stops:
            kept[t + 1] = state
    return kept


stops = [16, 64, 256, 512]
rounded = bfloat16_state(*inputs, stops)
errors = {"scan kernel, float32 state": [], "chunks of 64, float32": [], "recurrence, bfloat16 state": []}
for n in stops:
    part = [a[:n] for a in inputs[:5]]
    exact = chunked(*part, inputs[5], 64)[1]  # equal to the recurrence to 1e-14, and faster
    kernel = deltanet.scan(q[:n], k[:n], v[:n], decay[:n], beta[:n], empty_state, shape)[1]
    errors["scan kernel, float32 state"].append(norm_error(kernel, exact))
    errors["chunks of 64, float32"].append(norm_error(chunked(*part, inputs[5], 64, np.float32)[1], exact))
    errors["recurrence, bfloat16 state"].append(norm_error(rounded[n], exact))
for (label, values), colour in zip(errors.items(), (BLUE, PURPLE, RED), strict=True):
    plt.plot(stops, values, "o-", label=label, color=colour)
plt.gca().set(yscale="log", xlabel="tokens", ylabel="relative error of the state")
plt.xscale("log", base=2)
plt.legend()
table(["tokens", *errors], [[n, *[values[i] for values in errors.values()]] for i, n in enumerate(stops)])

# %% [markdown]
# These heads forget, and forgetting keeps errors bounded: an error made now fades with the same decay as the memory.
# A head that does not forget has no such help. The same keys, values and queries with a decay of 1:

# %%
kept_decay = np.ones_like(inputs[3])
inputs_kept = [*inputs[:3], kept_decay, inputs[4], inputs[5]]
rounded = bfloat16_state(*inputs_kept, stops)
growth = {"scan kernel, float32 state": [], "recurrence, bfloat16 state": []}
for n in stops:
    exact = chunked(*[a[:n] for a in inputs_kept[:5]], inputs[5], 64)[1]
    kernel = deltanet.scan(q[:n], k[:n], v[:n], mx.ones_like(decay)[:n], beta[:n], empty_state, shape)[1]
    growth["scan kernel, float32 state"].append(norm_error(kernel, exact))
    growth["recurrence, bfloat16 state"].append(norm_error(rounded[n], exact))
table(["tokens, decay 1", *growth], [[n, *[values[i] for values in growth.values()]] for i, n in enumerate(stops)])

# %% [markdown]
# A bfloat16 state loses four digits at once, and more where nothing is forgotten. The state is float32 here.
#
# ## Chunks of the prompt do not change the result
#
# A prompt goes through the layers in chunks, with the state handed over. Does the cut show?

# %%
first = deltanet.scan(q[:300], k[:300], v[:300], decay[:300], beta[:300], empty_state, shape)
second = deltanet.scan(q[300:], k[300:], v[300:], decay[300:], beta[300:], first[1], shape)
joined = np.concatenate([to_numpy(first[0]), to_numpy(second[0])])
print("y identical to the last bit:    ", np.array_equal(joined, to_numpy(y_scan)))
print("state identical to the last bit:", np.array_equal(np.array(second[1]), np.array(state_scan)))
assert np.array_equal(joined, to_numpy(y_scan))

# %% [markdown]
# **To try:** change `(1, 16, 64, 256)` above to a chunk longer than the text; take another layer; set every decay to 1
# and see the errors grow.
#
# Source of the method: Yang, Kautz, Hatamizadeh, *Gated Delta Networks* (arXiv:2412.06464). Kernels:
# `lily_mlx/kernels/deltanet/`.
