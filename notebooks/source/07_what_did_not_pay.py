# %% [markdown]
# # What did not pay
#
# Ideas that sound right and do not help are worth as much as those that do, if they come with numbers. This notebook has the
# article's list, what was recorded here on an NVIDIA H200, and the arithmetic behind the most surprising one: why guessing ahead with
# a small model (speculative decoding) loses on a mixture of experts.
#
# Nothing here was measured on Apple silicon by this project; where a figure is the article's, it says so.

# %%
import numpy as np
from lib import *

use_cpu()

# %% [markdown]
# ## Speculation: rows do not share their experts
#
# A draft proposes $k - 1$ tokens, and one pass over $k$ rows verifies them. In a dense model the pass reads the same weights as
# a single step, so the guesses are nearly free. In a mixture of experts each row wants its own experts. How
# many different ones do $k$ neighbouring tokens choose? Here by the real router of the bundled checkpoint, on text:

# %%
from lily_mlx.kernels.linear import embed, matmul, rms_norm
from lily_mlx.kernels.moe import route
from lily_mlx.model.cache import empty_caches
from lily_mlx.model.prefill import attention_chunk, deltanet_chunk, moe_chunk
from lily_mlx.model.weights import DeltaNetWeights

model = tiny_model()
config, weights = model.config, model.weights
tokens = mx.array(held_out_tokens(512), mx.uint32)
x, position, choices = embed(tokens, weights.embedding), mx.array([0], mx.int32), []
for layer, cache in zip(weights.layers, empty_caches(config), strict=True):
    if isinstance(layer.mixer, DeltaNetWeights):
        x, _ = deltanet_chunk(layer.mixer, config, x, cache)
    else:
        x, _ = attention_chunk(layer.mixer, config, x, position, 0, cache)
    normed = rms_norm(x, layer.moe.in_norm, config.norm_eps)
    logits = matmul(normed, layer.moe.router, out_dtype=mx.float32)
    choices.append(to_numpy(route(logits, config.top_k, config.normalise_scores).experts))
    x = moe_chunk(layer.moe, config, x)


def different(k):
    """Mean number of different experts among k neighbouring tokens, over layers and places."""
    return np.mean([len(np.unique(c[i : i + k])) for c in choices for i in range(0, len(c) - k, k)])


def independent(k, experts, top_k):
    """The same if each token chose on its own and without preferences."""
    return experts * (1 - (1 - top_k / experts) ** k)


ks = range(1, 9)
measured = [different(k) for k in ks]
table(["rows", "experts, real text", "if chosen at random", "times one row"],
      [[k, float(m), float(independent(k, config.experts, config.top_k)), float(m / config.top_k)] for k, m in zip(ks, measured, strict=True)])  # fmt: skip
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
axes[0].plot(ks, measured, "o-", color=BLUE, label="bundled checkpoint, real text")
axes[0].plot(ks, [independent(k, config.experts, config.top_k) for k in ks], "--", color=GREY, label="at random")
axes[0].set(xlabel="rows of the pass", ylabel=f"different experts of {config.experts}")
axes[0].legend(fontsize=9)
axes[1].plot(ks, [independent(k, 256, 8) for k in ks], "--", color=ORANGE, label="35B-A3B, at random")
axes[1].plot(ks, [8 * k for k in ks], ":", color=GREY, label="no sharing at all")
axes[1].set(xlabel="rows of the pass", ylabel="different experts of 256")
axes[1].legend(fontsize=9)
plt.tight_layout()

# %% [markdown]
# With 256 experts there is almost no sharing among a few rows. (The bundled checkpoint has 16 experts and a real text; the full-size
# curve assumes a router without preferences, and neighbouring tokens of a real one share somewhat more.)
#
# From the ledger of notebook 1 follows what a pass must read at least, and from that the best case of speculation: every launch at
# full bandwidth, and a draft that costs nothing.

# %%
counted = newest_result("launches")
parts = counted["minimum_bytes"]
one = sum(parts.values())


def pass_bytes(k):
    """Fewest bytes of a pass over k rows: everything once, experts as many as are chosen."""
    return one + parts["routed experts"] * (independent(k, 256, 8) / 8 - 1)


def gain(k, acceptance, draft):
    """Tokens of a cycle over its bytes, relative to plain steps; `draft` is the cost of one draft step in steps."""
    accepted = sum(acceptance**i for i in range(k))
    return accepted / (pass_bytes(k) / one + (k - 1) * draft) - 1


a = np.linspace(0.3, 1, 50)
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
for axis, draft in zip(axes, (0.0, 0.15), strict=True):
    for k, colour in ((2, GREEN), (3, BLUE), (4, PURPLE), (5, ORANGE)):
        axis.plot(a, [100 * gain(k, x, draft) for x in a], color=colour, label=f"{k} rows")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="acceptance of a drafted token", title=f"a draft step costs {draft:.0%} of a step", ylim=(-60, 120))
axes[0].set_ylabel("gain over plain decoding, %")
axes[0].legend(fontsize=9)
plt.tight_layout()
table(["rows", "bytes, times a step", "gain at 0.8, free draft, %", "gain at 0.8, draft 15 %, %", "gain at 0.5, draft 15 %, %"],
      [[k, pass_bytes(k) / one, 100 * gain(k, 0.8, 0), 100 * gain(k, 0.8, 0.15), 100 * gain(k, 0.5, 0.15)] for k in (2, 3, 4, 5)])  # fmt: skip

# %% [markdown]
# So bytes alone leave something: a quarter more tokens at an acceptance of 0.8 and a draft at 15 % of a step, and a loss
# at 0.5. What the bound leaves out is all on one side. Kernels for a few rows are less efficient than those for one; text that is
# sampled at a temperature accepts fewer guesses; and the state of Gated DeltaNet after the last *accepted* row does not exist,
# unless the pass writes one for each row (63 MB each) or runs a second time. The article measured its loop at 18 % *slower* than
# plain decoding, and a draft vocabulary that made drafts 4.7 to 5.1 % faster did not save it. `compare.ablations` has the
# same experiment for whoever wants to repeat it (`--mechanisms speculative-decoding`); the commands refuse a draft model, with a reason.
#
# ## Switched off, one at a time
#
# `python -m compare.ablations` runs the engine with and without one mechanism. A positive effect means that it pays.
# All that is recorded:

# %%
rows = []
for path in sorted((ROOT / "compare" / "results").glob("*-ablations-*.json")):
    result = json.loads(path.read_text())
    for r in result["rows"]:
        if "effect" in r:
            article = r.get("article_effect")
            rows.append([r["mechanism"], r["phase"], r["length"], 100 * r["effect"], 100 * r["spread"],
                         "-" if article is None else f"{100 * article:.1f}", result["device"]])  # fmt: skip
if rows:
    table(["mechanism", "phase", "length", "effect, %", "spread of rounds, %", "article (M5 Max), %", "device"], rows)
    fig, axis = plt.subplots(figsize=(8.5, 0.45 * len(rows) + 1.2))
    colours = [GREY if abs(r[3]) < r[4] else GREEN if r[3] > 0 else RED for r in rows]
    axis.barh(
        [f"{r[0]}, {r[2]:,}" for r in rows],
        [r[3] for r in rows],
        xerr=[r[4] for r in rows],
        color=colours,
        ecolor="#8c959f",
        capsize=3,
    )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel="effect, % (bars: spread of the rounds; grey: the spread is larger than the effect)")
    axis.invert_yaxis()
    plt.tight_layout()
else:
    print("no ablation recorded yet")

# %% [markdown]
# Read the grey bars as "not shown". A mechanism that pays on one device can cost on another: a bar to the left of zero is a
# mechanism of Apple's GPUs, by the article, that an H200 does not need in this form.
#
# ## The article's list
#
# By its authors, end to end on Apple silicon: no gain from fewer launches alone, from overlapping whole phases, from larger prefill
# tiles, from wider fusion, from a faster router, or from fusing the output projection with the choice of the token. They explain why
# some of it could not pay: their sparse matrix-vector kernel already ran at 90.3 % of the fastest sustained read for its access
# pattern, and taking its arithmetic away changed its time by 0.2 %.
#
# The first entry is worth a second look, because this engine *does* launch less:

# %%
for r in counted["rows"]:
    if r["phase"] == "decode":
        print(f"{r['engine']:9} {r['launches']:5} launches of {r['bytes'] / r['launches'] / 1e6:5.1f} MB on average")

# %% [markdown]
# On an H200 one such launch moves its bytes in 1.5 microseconds, less than it takes to start it, so launches are what a step costs
# there. On an M5 Max it takes eight times as long. Whether fewer launches pay depends on that ratio, which is why a result
# from one device is no argument about another.
#
# The short table, with all that was tried here: `docs/what_did_not_pay.md`.
