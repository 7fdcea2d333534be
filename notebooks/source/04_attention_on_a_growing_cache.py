# %% [markdown]
# # Attention on a growing cache
#
# Ten of forty layers of Qwen3.6 attend. In decode, each of 16 query heads wants the whole cache of its group, and the cache grows
# with every token: 20 KB for one, 2.7 GB at 131,072. Three ideas keep that affordable, all of them about *who reads what*:
# neighbouring lanes read neighbouring bytes; query heads that share keys share the read; and the cache is cut into parts so
# that the whole GPU reads at once.

# %%
import numpy as np
from lib import *
from lily_mlx.kernels import attention
from lily_mlx.kernels.attention import AttentionShape, reference
from lily_mlx.kernels.attention.policy import parts_plan

use_cpu()
model = tiny_model()
shape = model.config.attention
print(shape)
full_shape = AttentionShape(16, 2, 256, 64, 1e7)

# %% [markdown]
# ## A real cache
#
# The bundled checkpoint reads 300 tokens of held-out text; layer 3 attends. Its cache has two levels: whole blocks of 128 rows,
# and a tail that fills up. A kernel never writes to what it reads, so a step makes a new tail (at most 128 rows) and never
# copies the big part. Every 128 tokens the tail moves over.

# %%
from lily_mlx.model.cache import empty_caches
from lily_mlx.model.prefill import prefill_chunk

tokens = mx.array(held_out_tokens(301), mx.uint32)
_, caches = prefill_chunk(model.weights, model.config, tokens[:300], 0, empty_caches(model.config))
cache = caches[3]
print("keys", cache.keys.shape, " tail", cache.tail_keys.shape, " -> 300 tokens = 2 * 128 + 44")

# %% [markdown]
# ## Coalescing
#
# A GPU fetches memory in lines (128 bytes here). What counts is how many lines the 32 lanes of a simdgroup touch with one load.
# Rows of 256 bfloat16 are 512 bytes. Let each lane walk its own row, and one load of 16 bytes touches 32 lines and uses an
# eighth of each. Let the lanes share a row, and the same load touches 4 lines and uses all of them:

# %%
LINE, ROW = 128, 512


def lines(addresses, width=16):
    return len({byte // LINE for a in addresses for byte in (a, a + width - 1)})


lane = np.arange(32)
own_row, shared_row = lane * ROW, lane * 16
table(["layout", "lines touched", "bytes used", "bytes fetched"],
      [["a row for each lane", lines(own_row), 512, LINE * lines(own_row)],
       ["a row for all lanes", lines(shared_row), 512, LINE * lines(shared_row)]])  # fmt: skip
fig, axes = plt.subplots(2, 1, figsize=(9, 2.8))
for axis, addresses, title in zip(
    axes, (own_row, shared_row), ("a row for each lane", "a row for all lanes"), strict=True
):
    used = np.zeros((8, 32))
    for a in addresses:
        if a < 8 * ROW:
            used[a // ROW, a % ROW // 16] = 1
    axis.imshow(used, aspect="auto", cmap="Blues", vmax=1.4)
    axis.set(title=title, ylabel="row", yticks=[0, 7])
    axis.grid(False)
axes[1].set_xlabel("16-byte piece of the row; dark: read by one load (first 8 rows)")
plt.tight_layout()

# %% [markdown]
# A cache may keep the other 7 pieces for the next loads, so the loss is not eightfold in practice. The article measured 33.8
# to 47.9 GB/s for keys and 42.0 to 61.8 GB/s for values, worth 2.1 % of decode at 3,840 tokens.
#
# ## Query heads that share keys
#
# Eight query heads of a group use the same keys. Eight kernels (or threadgroups) that each read them move eight times the bytes.
# The step kernel keeps all eight queries in registers and reads each row once:


# %%
def cache_megabytes(context, reads):
    return reads * 2 * full_shape.kv_heads * full_shape.head_dim * 2 * context / 1e6


contexts = 2 ** np.arange(10, 18)
for reads, colour, label in ((8, RED, "each query head on its own: 8 reads"), (2, PURPLE, "4 heads together: 2 reads (the article)"),
                             (1, BLUE, "8 heads together: 1 read (here)")):  # fmt: skip
    plt.plot(contexts, [cache_megabytes(n, reads) for n in contexts], "o-", color=colour, label=label)
plt.gca().set(yscale="log", xlabel="tokens in the context", ylabel="MB read in one layer")
plt.xscale("log", base=2)
plt.legend()
print(parts_plan(32768, 8))

# %% [markdown]
# Packing changes who reads and not what is computed. Different splits of the heads over simdgroups give the same bytes:

# %%
from dataclasses import replace

generator = np.random.default_rng(0)
proj = bf16(generator.normal(size=(1, shape.projection_width)))
ones = bf16(np.ones(shape.head_dim))
position = mx.array([300], mx.int32)
inputs = (proj, ones, ones, position, cache, shape, 1e-6)
plan = parts_plan(cache.capacity, shape.group)
outputs = {}
for heads, sets in ((8, 1), (4, 2), (2, 4)):
    packed = replace(plan, heads=heads, head_sets=sets, streams=2)
    output, _ = attention.step(*inputs, packed)
    outputs[heads] = to_numpy(output)
    print(
        f"{heads} heads in a simdgroup, {sets} sets: largest difference to 8 heads",
        np.abs(outputs[heads] - outputs[8]).max(),
    )

# %% [markdown]
# And against the definition, softmax over all rows in float64:

# %%
float_cache = reference.KVCache(*(to_numpy(a) for a in (cache.keys, cache.values, cache.tail_keys, cache.tail_values)))
float_ones = np.ones(shape.head_dim)
float_inputs = (to_numpy(proj), float_ones, float_ones, np.array([300]))
want, float_cache = reference.step(*float_inputs, float_cache, shape, 1e-6)
print(f"relative error: {relative_error(attention.step(*inputs)[0], want):.1e}")

# %% [markdown]
# ## Parts
#
# One threadgroup for each KV head makes two, on a GPU that wants hundreds. So the rows are cut into parts. A part computes its
# own softmax numerator, with its own maximum $m_p$ and sum $s_p$, and a second launch joins them:
#
# $$\text{out} = \frac{\sum_p 2^{m_p - m}\, o_p}{\sum_p 2^{m_p - m}\, s_p}, \qquad m = \max_p m_p .$$
#
# This is exact: softmax does not care how its sum is grouped. Here with parts of any size, in float64:


# %%
def in_parts(q, keys, values, rows):
    """Attention of one query over keys in parts of `rows`."""
    maxima, sums, outs = [], [], []
    for start in range(0, len(keys), rows):
        scores = keys[start : start + rows] @ q / np.sqrt(len(q)) * np.log2(np.e)
        maxima.append(scores.max())
        weights = 2 ** (scores - maxima[-1])
        sums.append(weights.sum())
        outs.append(weights @ values[start : start + rows])
    scale = 2 ** (np.array(maxima) - max(maxima))
    return scale @ np.array(outs) / (scale @ np.array(sums))


keys, values = reference.rows(float_cache, 301)
queries, _ = reference.prepare(*float_inputs, shape, 1e-6)
whole = in_parts(queries[0, 0], keys[0], values[0], 301)
for rows in (1, 7, 64, 128):
    print(f"parts of {rows:3}: {relative_error(in_parts(queries[0, 0], keys[0], values[0], rows), whole):.0e}")

# %% [markdown]
# How many rows in a part? Few rows: many threadgroups, but each part writes 256 floats and two statistics for every query
# head, which the second launch reads again. Many rows: little overhead, few threadgroups. The policy takes more rows as
# the cache grows:

# %%
plans = {int(n): parts_plan(int(n), 8) for n in 2 ** np.arange(7, 18)}


def overhead(context, rows):
    """Bytes of partial results, written and read, over bytes of keys and values."""
    parts = -(-context // rows)
    return 2 * parts * full_shape.query_heads * (full_shape.head_dim + 2) * 4 / (cache_megabytes(context, 1) * 1e6)


table(["capacity", "rows of a part", "threadgroups", "partial results / cache, %"],
      [[n, p.part_rows, 2 * p.main_parts(n), 100 * overhead(n, p.part_rows)] for n, p in plans.items()])  # fmt: skip
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
for rows, colour in ((64, GREEN), (128, PURPLE), (512, ORANGE)):
    axes[0].plot(list(plans), [2 * -(-n // rows) for n in plans], ":", color=colour, label=f"always {rows} rows")
    axes[1].plot(list(plans), [100 * overhead(n, rows) for n in plans], ":", color=colour)
axes[0].plot(list(plans), [2 * p.main_parts(n) for n, p in plans.items()], "o-", color=BLUE, label="the policy")
axes[1].plot(list(plans), [100 * overhead(n, p.part_rows) for n, p in plans.items()], "o-", color=BLUE)
axes[0].set(yscale="log", ylabel="threadgroups", xlabel="capacity of the cache")
axes[1].set(ylabel="partial results / cache, %", xlabel="capacity of the cache")
axes[0].set_xscale("log", base=2)
axes[0].legend(fontsize=9)
plt.tight_layout()

# %% [markdown]
# The thresholds (4,096, 16,384 and 65,536 rows) are reasoned from these two curves, not tuned on an Apple GPU, where nothing was measured.
# On an NVIDIA H200 there is a recorded comparison with a fixed number of parts:

# %%
result = newest_result("ablations", lambda r: any(row["mechanism"] == "growing-parts" for row in r["rows"]))
if result:
    print(result["file"], "on", result["device"])
    table(["context", "with, tokens/s", "without", "effect, %", "spread of rounds, %"],
          [[r["length"], r["with"], r["without"], 100 * r["effect"], 100 * r["spread"]] for r in result["rows"] if r["mechanism"] == "growing-parts"])  # fmt: skip
else:
    print("no result recorded yet")

# %% [markdown]
# The article's fixed blocks gained 7.7 %, 27.4 % and 40.2 % of decode at 32, 64 and 128 thousand tokens on an M5 Max, against
# its own general path. A mechanism of one device is not one of another: read the sign of the effect and the spread of the rounds
# above before you believe either.
#
# **To try:** `parts_plan(..)` with another `_PART_ROWS`; poison the unused rows of the cache with NaN and see that nothing changes.
