# %% [markdown]
# # Numerical consistency
#
# Are two engines the same? "They print the same text" is too strict: one near tie that rounds the other way, and greedy texts
# part for ever. "The text looks fine" is too weak: a model survives a lot of damage before its text looks wrong. This
# notebook compares engines the way the tests here do: feed both the *same* text, look at every prediction, and explain every
# disagreement.

# %%
import numpy as np
from lib import *

use_cpu()
from compare.arms import load_mlx_lm
from compare.consistency import compare, in_float32, lily_logits, log_softmax, mlx_lm_logits

# %% [markdown]
# ## Teacher forcing
#
# 192 tokens of held-out text, the number that the article used. Both engines predict each next token and then get the true one,
# so an early difference cannot grow. Three runs: ours; mlx_lm as it is, in bfloat16; and mlx_lm with float32
# activations, as a referee that hardly rounds.

# %%
tokens = held_out_tokens(192)
model = tiny_model()
ours = lily_logits(model, tokens)
other = load_mlx_lm("tiny", 0, None)
theirs = mlx_lm_logits(other, tokens)
exact = mlx_lm_logits(in_float32(other), tokens)

pairs = {"ours / mlx_lm": (ours, theirs), "ours / float32": (ours, exact), "mlx_lm / float32": (theirs, exact)}
figures = {name: compare(a, b, tokens) for name, (a, b) in pairs.items()}
table(["engine / baseline", "perplexity", "ratio", "same best token, %", "gap there, median", "gap there, largest"],
      [[n, f["perplexity"], f["perplexity_ratio"], 100 * f["top1_agreement"], f["gap_median"], f["gap_max"]] for n, f in figures.items()])  # fmt: skip

# %% [markdown]
# The article reports, for its engine, a perplexity 0.04 % above mlx_lm's and the same best token at 96.35 % of 192 positions, for the real checkpoint on Apple
# silicon. The line to look at here is the referee's: which of the two bfloat16 engines is *nearer to float32*?
#
# ## Disagreements are near ties
#
# At each position, the gap between the referee's best and second-best token. A wrong kernel would disagree anywhere. Rounding
# disagrees where the gap is small:

# %%
ranked = np.sort(log_softmax(exact), axis=-1)
gaps = ranked[:, -1] - ranked[:, -2]
fig, axis = plt.subplots(figsize=(8.5, 3.4))
axis.plot(np.sort(gaps), np.linspace(0, 100, len(gaps)), color=GREY, label="all positions")
for name, logits, colour, height in (("mlx_lm", theirs, ORANGE, 30), ("ours", ours, BLUE, 60)):
    differs = logits.argmax(-1) != exact.argmax(-1)
    axis.plot(
        gaps[differs],
        np.full(differs.sum(), height),
        "x",
        color=colour,
        label=f"{name} differs from float32: {differs.sum()}",
    )
    print(
        f"{name}: {differs.sum()} of {len(gaps)} differ, the largest gap there is {max(gaps[differs], default=0):.3f}"
    )
axis.set(xscale="log", xlabel="gap between the two best log-probabilities (float32)", ylabel="positions below, %")
axis.legend(loc="upper left")
# %% [markdown]
# The positions, with what each would have said:

# %%
from mlx_lm.utils import load_tokenizer

tokenizer = load_tokenizer(TINY)


def word(token):
    return repr(tokenizer.decode([int(token)]))


rows = []
for position in np.flatnonzero(ours.argmax(-1) != theirs.argmax(-1)):
    rows.append([int(position), *(word(x[position].argmax()) for x in (ours, theirs, exact)), float(gaps[position])])
table(["position", "ours", "mlx_lm", "float32", "gap"], rows or [[0, "-", "-", "-", 0.0]])

# %% [markdown]
# ## The error itself
#
# Root mean square of the difference of logits to float32, in units of their standard deviation. This sees a small systematic
# error long before any token changes:


# %%
def rms(a, b):
    return float(np.sqrt(np.mean((a - b) ** 2)) / b.std())


print(f"ours    {rms(ours, exact):.2e}\nmlx_lm  {rms(theirs, exact):.2e}")
by_position = {
    n: np.sqrt(np.mean((x - exact) ** 2, axis=-1)) / exact.std() for n, x in (("mlx_lm", theirs), ("ours", ours))
}
for (name, values), colour in zip(by_position.items(), (ORANGE, BLUE), strict=True):
    plt.semilogy(values, color=colour, label=name)
plt.gca().set(xlabel="position", ylabel="error of the logits / their deviation")
plt.legend()
# %% [markdown]
# The error does not grow along the text: the state forgets rounding as it forgets everything else (notebook 2). Where it jumps, the
# router had a near tie: another expert is a real change, made by a rounding error.
#
# The gate of every measurement here follows from this picture. Before `compare.sweep` reports a speed, our distance to float32 must be
# at most 1.25 times mlx_lm's own.
#
# ## A second opinion
#
# mlx_lm could be wrong in the same way. So the recorded comparison has transformers' torch implementation too, in float32 with
# the dequantised weights:

# %%
result = newest_result("consistency")
print(result["file"], "on", result["device"])
table(["engine", "baseline", "perplexity ratio", "same best token, %"],
      [[r["engine"], r["baseline"], r["perplexity_ratio"], 100 * r["top1_agreement"]] for r in result["rows"]])  # fmt: skip

# %% [markdown]
# ## Chunks do not matter
#
# A prompt goes through the layers in chunks, and a text may be read by prefill or token by token. The same logits should come out.
# Different chunk sizes take different kernels (a step is not a chunk of one: it has its own matrix-vector kernels), so this
# compares almost every kernel here with another one:

# %%
from lily_mlx.engine import make_sampling
from lily_mlx.model.cache import empty_caches, merge_tails
from lily_mlx.model.prefill import all_logits, prefill_chunk


short = tokens[:64]


def in_chunks(size):
    caches, parts = empty_caches(model.config), []
    for start in range(0, len(short), size):
        chunk = mx.array(short[start : start + size], mx.uint32)
        x, caches = prefill_chunk(model.weights, model.config, chunk, start, caches)
        parts.append(to_numpy(all_logits(model.weights, model.config, x)))
    return np.concatenate(parts)


def step_by_step():
    greedy, caches, parts = make_sampling(temp=0.0), empty_caches(model.config), []
    for i, token in enumerate(short):
        output = model.step(mx.array([token], mx.uint32), mx.array([i], mx.int32), caches, greedy)
        caches = merge_tails(output.caches, i + 1)
        parts.append(to_numpy(output.logits))
    return np.concatenate(parts)


whole = in_chunks(64)
others = {**{f"chunks of {n}": in_chunks(n) for n in (7, 16, 33)}, "steps": step_by_step()}
rows = [[name, rms(x, whole), 100 * float((x.argmax(-1) == whole.argmax(-1)).mean())] for name, x in others.items()]
table(["64 tokens, against all at once", "error / deviation", "same best token, %"], rows)
assert all(row[1] < 2 * rms(theirs, exact) for row in rows), "chunking must cost no more than bfloat16 itself"

# %% [markdown]
# Chunks of every size give the same bits here: a row's sums are added in an order that does not depend on its neighbours.
# Steps have kernels that add in another order, and differ by the rounding of bfloat16, a fraction of mlx_lm's own distance to
# float32. (On a GPU, tiles depend on the number of rows, and chunks may differ in the same small way.)
#
# **To try:** break something small (`config.norm_eps` ten times larger, say) and see which of the figures notices first.
# The command that writes such a comparison to a file: `python -m compare.consistency --model tiny`.
