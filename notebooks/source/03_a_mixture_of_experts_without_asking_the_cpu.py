# %% [markdown]
# # A mixture of experts without asking the CPU
#
# In each layer of Qwen3.6 a router picks 8 of 256 experts for every token. In prefill, thousands of tokens arrive at
# once, and each expert should multiply *its* tokens in one matrix product. How many tokens is that? Only the GPU knows: the
# router has just run there. An engine that asks (reads 256 numbers back, then submits 256 products) stalls the GPU twice
# a layer. The article measured +89 % prefill speed at 512 tokens for not asking, on an M5 Max.
#
# Here nothing is asked. Three launches turn the router's logits into a list of equal blocks of work, and the grids of
# everything that follows are known before the router runs. This notebook walks through the three.

# %%
import numpy as np
from lib import *

use_cpu()
model = tiny_model()
config = model.config
print(f"{config.experts} experts, {config.top_k} for each token, and one shared expert that sees every token")

# %% [markdown]
# ## Real logits
#
# Layer 1 of the bundled checkpoint on 256 tokens of held-out text.

# %%
from lily_mlx.kernels.linear import embed, matmul, rms_norm
from lily_mlx.kernels.moe import combine, grouped_down, grouped_gate_up, reference, route
from lily_mlx.model.cache import empty_caches
from lily_mlx.model.prefill import deltanet_chunk, moe_chunk

tokens = mx.array(held_out_tokens(256), mx.uint32)
weights, caches = model.weights, empty_caches(config)
x = embed(tokens, weights.embedding)
x, _ = deltanet_chunk(weights.layers[0].mixer, config, x, caches[0])
x = moe_chunk(weights.layers[0].moe, config, x)
x, _ = deltanet_chunk(weights.layers[1].mixer, config, x, caches[1])

block = weights.layers[1].moe
normed = rms_norm(x, block.in_norm, config.norm_eps)
logits = matmul(normed, block.router, out_dtype=mx.float32)  # the last column is the shared expert's gate
routing = route(logits, config.top_k, config.normalise_scores)
print("logits", logits.shape, "-> pairs of a token and an expert:", routing.experts.size)

# %% [markdown]
# ## Launch 1: choose
#
# One simdgroup for each token keeps the logits in registers and takes the largest, `top_k` times. Scores are the
# softmax over the chosen ones. The white map below is a text being read: each column is a token, each row an expert.

# %%
chosen = to_numpy(routing.experts)
used = np.zeros((config.experts, len(tokens)))
used[chosen.ravel(), np.repeat(np.arange(len(tokens)), config.top_k)] = to_numpy(routing.scores)[
    :, : config.top_k
].ravel()
plt.figure(figsize=(9, 2.6))
plt.imshow(used, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
plt.colorbar(label="score")
plt.gca().set(xlabel="token", ylabel="expert")
plt.grid(False)

# %% [markdown]
# ## Launch 2: sort, which is a histogram and a scan
#
# A counting sort by expert: count the tokens of each expert, add up the counts to get where each expert's rows begin,
# then write each token to its place. The sort is stable (an expert's tokens stay in the order of the text), so the
# result is always the same. A version with atomic counters would be shorter and give another order each time.

# %%
offsets = to_numpy(routing.offsets)
counts = np.diff(offsets)
fig, axes = plt.subplots(1, 2, figsize=(9, 3))
axes[0].bar(range(config.experts), counts, color=BLUE)
axes[0].axhline(counts.mean(), color=GREY, linestyle="--")
axes[0].set(xlabel="expert", ylabel="tokens", title="histogram")
axes[1].step(range(config.experts + 1), offsets, where="post", color=PURPLE)
axes[1].set(xlabel="expert", ylabel="first row", title="its running sum: where rows begin")
plt.tight_layout()
print("tokens of an expert: fewest", counts.min(), " mean", counts.mean(), " most", counts.max())

# %% [markdown]
# ## Launch 3: map blocks
#
# The matrix products work on blocks of at most `tile_rows` rows of one expert. `blocks` says for each block which expert,
# which first row, and how many rows. An expert with 50 rows has two blocks of 32; one without rows has none.
# Number of blocks? That is again something only the GPU knows. But there is a bound that holds for *any* routing:
#
# $$\underbrace{\lceil M / T \rceil}_{\text{shared expert}} + \lceil M k / T \rceil + \min(E, M k),$$
#
# because each expert has at most one block that is not full. The grid has that many; a block beyond the last finds a row
# count of 0 and returns at once.

# %%
blocks = to_numpy(routing.blocks)
print(f"blocks of {routing.tile_rows} rows: {len(blocks)} in the grid, {np.count_nonzero(blocks[:, 2])} with work")
table(
    ["block", "expert", "first row", "rows"],
    [[i, *map(int, blocks[i, :3])] for i in (0, 1, 4, 5, 8, 9, 10, len(blocks) - 1)],
)

# %% [markdown]
# Expert 16 is the shared one: it comes first, and its rows stand behind all others. A chunk of at most 64 rows does all
# three in one launch, by one threadgroup. The launches against the definition (`reference.py`, NumPy and `argsort`):

# %%
want = reference.route(to_numpy(logits), config.top_k, config.normalise_scores)
for name in ("experts", "offsets", "row_tokens", "slot_rows"):
    assert np.array_equal(to_numpy(getattr(routing, name)), getattr(want, name)), name
print(
    "experts, offsets, row_tokens and slot_rows are those of the definition; scores:",
    f"{relative_error(routing.scores, want.scores):.0e}",
)

# every row of every expert is in exactly one block
covered = np.concatenate([np.arange(first, first + rows) for _, first, rows, _ in blocks])
assert np.array_equal(np.sort(covered), np.arange(routing.rows))
print("each of", routing.rows, "rows is in exactly one block")

# %% [markdown]
# ## The work itself
#
# Two products and a weighted sum finish the layer. Compared with the definition, where each token is multiplied by each of its
# experts on its own:

# %%
from lily_mlx.kernels.linear.reference import dequantize

experts = block.experts
dense = reference.DenseExperts(
    *(dequantize(getattr(experts, n)) for n in ("gate", "up", "down", "shared_gate", "shared_up", "shared_down"))
)
out = combine(grouped_down(grouped_gate_up(normed, routing, experts), routing, experts), routing, x)
exact = reference.combine(
    reference.grouped_down(reference.grouped_gate_up(to_numpy(normed), want, dense), want, dense), want, to_numpy(x)
)
print(f"relative error of the layer's output: {relative_error(out, exact):.1e}  (bfloat16 rounds at 4e-3)")

# %% [markdown]
# ## How tall should a block be?
#
# A block reads its expert's weights once, whatever its height. Low blocks read them often; tall ones multiply rows that are not
# there. Both are exact integers once the counts are known, so no measurement is needed to see the trade. At the size of
# Qwen3.6-35B-A3B (256 experts, 8 for each token), for a router without preferences and for one that likes some experts
# much more than others (weights that fall as $1/\text{rank}$):


# %%
def full_size_counts(tokens, skew, seed=0):
    """Tokens of each of 256 experts; probabilities fall as rank**-skew. Gumbel noise picks 8 without repetition."""
    generator = np.random.default_rng(seed)
    preference = -skew * np.log(np.arange(1, 257))
    noisy = preference + generator.gumbel(size=(tokens, 256))
    return np.bincount(np.argpartition(-noisy, 8)[:, :8].ravel(), minlength=256)


heights = np.array([8, 16, 32, 64, 128])


def cost(counts, height):
    """(reads of an expert's weights, share of multiplied rows that are padding)"""
    needed = -(-counts // height)
    return needed.sum(), 1 - counts.sum() / (needed.sum() * height)


fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
rows = []
for n, colour in ((128, GREEN), (512, ORANGE), (2048, BLUE)):
    for skew, style in ((0.0, "-"), (1.0, "--")):
        figures = [cost(full_size_counts(n, skew), h) for h in heights]
        axes[0].plot(
            heights,
            [f[0] for f in figures],
            style,
            marker="o",
            color=colour,
            label=f"{n} tokens" + (", skewed" if skew else ""),
        )
        axes[1].plot(heights, [100 * f[1] for f in figures], style, marker="o", color=colour)
        rows += [
            [n, "skewed" if skew else "even", int(h), int(f[0]), float(100 * f[1])]
            for h, f in zip(heights, figures, strict=True)
            if h in (16, 32, 64)
        ]
axes[0].set(ylabel="reads of an expert's weights", yscale="log")
axes[1].set(ylabel="padding, % of the multiplied rows", ylim=(0, 100))
for axis in axes:
    axis.set_xscale("log", base=2)
    axis.set(xlabel="height of a block", xticks=heights, xticklabels=heights)
axes[0].legend(fontsize=8)
plt.tight_layout()
table(["tokens", "router", "height", "reads", "padding, %"], rows)

# %% [markdown]
# With 2,048 tokens an expert has 64 rows on average. Going from 16 to 32 rows saves almost half of the weight reads and adds
# some padding; the article gained 13.2 % of prefill speed by it at that length. With 128 tokens an expert has 4, and
# a tall block is mostly air. So the height follows from the average, which is known before the router runs
# (`lily_mlx/kernels/moe/policy.py`):

# %%
from lily_mlx.kernels.moe.policy import DEVICES, tile_height

table(
    ["tokens", "rows per expert", "height here"],
    [[n, n * 8 / 256, tile_height(n, 8, 256)] for n in (1, 16, 128, 256, 512, 1024, 2048, 4096)],
)
print("spread by backend:", {name: policy.spread for name, policy in DEVICES.items()})

# %% [markdown]
# ## Skew made visible
#
# A skewed router is the hard case: one expert may get a tenth of all rows. What happens to the blocks? Sorted by expert, the
# sequence of blocks is still a plain list, so a popular expert just has more of them, and no threadgroup has more than
# one block to do:

# %%
fig, axes = plt.subplots(2, 1, figsize=(9, 3.4), sharex=True)
for axis, skew, title in zip(axes, (0.0, 1.0), ("even", "skewed"), strict=True):
    c = full_size_counts(2048, skew)
    owner = np.repeat(np.arange(256), -(-c // 64))
    fill = np.concatenate([np.minimum(64, n - 64 * np.arange(-(-n // 64))) for n in c])
    axis.bar(range(len(fill)), fill, width=1.0, color=np.where(owner % 2, BLUE, "#9ec5f0"))
    axis.set(ylabel="rows", title=f"{title}: {len(fill)} blocks, the most loaded expert has {c.max()} rows")
axes[1].set(xlabel="block of 64 rows (the colour changes with the expert)")
plt.tight_layout()

# %% [markdown]
# And the kernels themselves on the most skewed routing there is, every token to the same experts:

# %%
same = mx.zeros((300, config.experts + 1), mx.float32) + mx.arange(config.experts + 1).astype(mx.float32)
extreme = route(same, config.top_k, True)
print("tokens of each expert:", np.diff(to_numpy(extreme.offsets)))
print("blocks with work:", np.count_nonzero(to_numpy(extreme.blocks)[:, 2]), "of", len(extreme.blocks))
assert np.array_equal(to_numpy(extreme.offsets), reference.route(to_numpy(same), config.top_k, True).offsets)

# %% [markdown]
# **To try:** `route(..., tile_rows=8)` and count the blocks again; break ties (two equal logits) and see which expert wins.
#
# Kernels: `lily_mlx/kernels/moe/` (`select_experts`, `sort_rows`, `map_blocks`, `grouped_gate_up`, `grouped_down`,
# `combine`). The figures +89 % and +13.2 % are the article's, for an M5 Max.
