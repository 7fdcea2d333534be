# %% [markdown]
# # Where the bytes go
#
# A GPU that generates text for one reader multiplies little and reads much: every weight that takes part in a token must come
# out of memory once, is used for two operations, and is forgotten. So the first question about an engine is not how
# fast it computes but how many bytes it moves, and the second how near it comes to the fewest possible.
#
# This notebook counts those bytes for Qwen3.6-35B-A3B in 4 bits. It is arithmetic on shapes and on recorded results;
# nothing here was measured on Apple silicon by this project.

# %%
import numpy as np
from lib import *

use_cpu()

# %% [markdown]
# ## The ledger of one token
#
# Real arrays say it best. `ledger` adds up the bytes of every array that a decode step must touch: all of a dense projection, but
# only `top_k` of the experts; the state of Gated DeltaNet read and written; keys and values once for each token
# of the context. First for the bundled checkpoint, whose arrays are here, then for the full size, with arrays that have a
# shape but no memory.

# %%
from compare.full_size import configuration
from lily_mlx.model import ModelConfig
from lily_mlx.model.abstract import abstract_weights
from lily_mlx.model.weights import DeltaNetWeights


def size(w):
    return w.weight.nbytes + w.scales.nbytes + w.biases.nbytes


def ledger(weights, config, context):
    """Bytes by part, of one decode step after `context` tokens."""
    parts = dict.fromkeys(("routed experts", "gated deltanet projections", "lm_head", "attention projections",
                           "shared experts", "routers", "gated deltanet state", "keys and values"), 0)  # fmt: skip
    for layer in weights.layers:
        e, mixer = layer.moe.experts, layer.mixer
        parts["routed experts"] += sum(size(w) for w in (e.gate, e.up, e.down)) * config.top_k // config.experts
        parts["shared experts"] += sum(size(w) for w in (e.shared_gate, e.shared_up, e.shared_down))
        parts["routers"] += size(layer.moe.router)
        if isinstance(mixer, DeltaNetWeights):
            s = config.deltanet
            parts["gated deltanet projections"] += size(mixer.in_proj) + size(mixer.out_proj)
            parts["gated deltanet state"] += 2 * s.value_heads * s.value_dim * s.key_dim * 4
        else:
            s = config.attention
            parts["attention projections"] += size(mixer.in_proj) + size(mixer.out_proj)
            parts["keys and values"] += 2 * s.kv_heads * s.head_dim * 2 * context
    parts["lm_head"] = size(weights.head)
    return parts


tiny = tiny_model()
full_config = ModelConfig.from_dict(configuration())
full = ledger(abstract_weights(full_config), full_config, 4096)
small = ledger(tiny.weights, tiny.config, 4096)
table(["part, after 4,096 tokens", "tiny, MB", "35B-A3B, MB", "share, %"],
      [[name, small[name] / 1e6, full[name] / 1e6, 100 * full[name] / sum(full.values())] for name in full])  # fmt: skip
total = sum(full.values())
print(f"\ntogether {total / 1e9:.3f} GB for one token, of a checkpoint of 19.4 GB")

# %%
counted = newest_result("launches")
assert full == counted["minimum_bytes"], "the ledger and compare.launches must agree"
print("the same as", counted["file"])

# %% [markdown]
# Nearly twice as much goes to dense projections and the head as to the eight experts that everybody talks about. The state of Gated
# DeltaNet costs 126 MB whatever the context. Keys and values begin small, because only 10 of 40 layers attend, and grow:

# %%
contexts = 2 ** np.arange(8, 18)
stacks = {name: [] for name in full}
for context in contexts:
    for name, value in {**full, "keys and values": full["keys and values"] * context // 4096}.items():
        stacks[name].append(value / 1e9)
colours = ["#0550ae", "#0969da", "#54aeff", "#80ccff", "#b6e3ff", "#ddf4ff", PURPLE, ORANGE]
plt.figure(figsize=(8.5, 4))
plt.stackplot(contexts, list(stacks.values()), labels=list(stacks), colors=colours)
plt.gca().set(xlabel="tokens in the context", ylabel="GB for one token")
plt.xscale("log", base=2)
plt.legend(loc="upper left", fontsize=8, ncols=2)
# %% [markdown]
# ## The floor
#
# Bytes over bandwidth is the shortest time a step can take; its inverse is the most tokens a second. The bandwidths are the
# vendors' own figures for each part (the largest configuration of that name), which no program reaches entirely: a plain
# copy gets some nine tenths. A machine also needs the memory to hold 19.4 GB.

# %%
# GB/s, and the most memory in GB, as the vendors state them.
PARTS = {
    "M1": (68, 16), "M1 Pro": (200, 32), "M1 Max": (400, 64), "M1 Ultra": (800, 128),
    "M2": (100, 24), "M2 Pro": (200, 32), "M2 Max": (400, 96), "M2 Ultra": (800, 192),
    "M3": (100, 24), "M3 Pro": (150, 36), "M3 Max": (400, 128), "M3 Ultra": (819, 512),
    "M4": (120, 32), "M4 Pro": (273, 64), "M4 Max": (546, 128),
    "M5": (153, 32), "M5 Pro": (307, 64), "M5 Max": (614, 128),
    "H200": (4800, 141),
}  # fmt: skip
floors = {name: bandwidth * 1e9 / total for name, (bandwidth, _) in PARTS.items()}
fits = {name: memory > 20 for name, (_, memory) in PARTS.items()}
plt.figure(figsize=(9, 3.8))
plt.bar(list(floors), list(floors.values()), color=[BLUE if fits[n] else "#d0d7de" for n in floors])
for i, value in enumerate(floors.values()):
    plt.text(i, value * 1.08, f"{value:.0f}", ha="center", fontsize=9)
plt.yscale("log")
plt.ylim(20, 6000)
plt.xticks(rotation=60)
plt.ylabel("tokens/s, at most")
plt.title("The floor after 4,096 tokens; grey: not enough memory", fontsize=11)
# %% [markdown]
# ## How near do engines come?
#
# For the M5 Max there are two figures in the article, measured by its authors at 4,096 tokens. For the H200 there are those recorded
# in this repository, if a run of `python -m compare.sweep` with decode rows is among the results. The launches that an engine
# makes and the bytes that they move in all can be counted without any device, from its exported graph:

# %%
rows = [[row["engine"], row["launches"], row["stages"], row["bytes"] / 1e9, 100 * total / row["bytes"]]
        for row in counted["rows"] if row["phase"] == "decode"]  # fmt: skip
table(["engine, decode at 4,096", "launches", "longest chain", "GB moved", "floor / moved, %"], rows)
for name, figures in counted["published"].items():
    print(f"{name}: {figures['launches']} launches, longest chain {figures['stages']} (its own count)")

# %% [markdown]
# The two move nearly the same bytes: mlx_lm is already careful with weights. What differs by a factor of seven is the number of
# launches. A launch of 1 MB of weights is over in 2 microseconds on an M5 Max, if it runs at full bandwidth; starting it and waiting
# for the one before takes time of the same order.


# %%
def decode_rows(result):
    return [r for r in result["rows"] if r["phase"] == "decode" and 0 < r["length"] <= 2**17]


measured = [("M5 Max", "the article's engine", 186.6, "article"), ("M5 Max", "mlx_lm", 140.9, "article")]
sweep = newest_result("sweep", lambda r: "H200" in r["device"] and decode_rows(r) and r["gate"]["green"])
for result in [r for r in (sweep, newest_result("peer", lambda r: "H200" in r["device"])) if r]:
    measured += [
        ("H200", r["engine"], r["tokens_per_s"], result["file"]) for r in decode_rows(result) if r["length"] == 4096
    ]
print("decode of ours on the H200:", sweep["file"] if sweep else "no result recorded yet")
rows = [
    [part, engine, speed, floors[part], 100 * speed / floors[part], source] for part, engine, speed, source in measured
]
table(["part", "engine", "tokens/s at 4,096", "floor", "share, %", "source"], rows)

fig, axis = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.2))
axis.barh(
    [f"{r[0]}: {r[1]}" for r in rows], [r[4] for r in rows], color=[BLUE if r[1] == "lily_mlx" else GREY for r in rows]
)
axis.set(xlabel="% of the floor", xlim=(0, 100))
axis.invert_yaxis()
plt.tight_layout()

# %% [markdown]
# (The peer's checkpoint is another format of nearly the same size, so its share is approximate.)
#
# The faster the memory, the harder it is to come near the floor: a step that needs 3 ms of bandwidth hides its launches, one
# that needs 0.4 ms does not.
#
# ## Prefill is another machine
#
# A chunk of $M$ tokens reads each weight once and uses it for up to $M$ rows. Operations for each byte, the arithmetic
# intensity, decide which resource runs out first:


# %%
def used_experts(tokens):
    """Expected number of the 256 experts that somebody chooses, with a router without preferences."""
    return 256 * (1 - (1 - 8 / 256) ** tokens)


def intensity(tokens):
    """(operations, bytes) of a chunk: multiply and add for each weight of each token; weights once, state once."""
    weights = {k: v for k, v in full.items() if k not in ("gated deltanet state", "keys and values", "routers")}
    operations = tokens * 2 * sum(weights.values()) / 0.5625  # 4 bits, and 32 bits of scale and bias for 64 weights
    moved = sum(weights.values()) - full["routed experts"] + full["routed experts"] * used_experts(tokens) / 8
    return operations, moved + full["gated deltanet state"]


tokens = 2 ** np.arange(0, 14)
ratio = np.array([o / b for o, b in map(intensity, tokens)])
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
axes[0].plot(tokens, [used_experts(n) for n in tokens], "o-", color=BLUE)
axes[0].set(xlabel="tokens of a chunk", ylabel="experts read", xscale="log")
axes[0].set_xscale("log", base=2)
x = np.logspace(-0.3, 3.5, 200)
for name, bandwidth, peak, colour in (("M1 Max, float32", 0.4, 10.4, ORANGE), ("H200, bfloat16", 4.8, 989, GREEN)):
    axes[1].plot(x, np.minimum(bandwidth * x, peak), color=colour, label=name)
    axes[1].plot(ratio, np.minimum(bandwidth * ratio, peak), ".", color=colour)
for n in (1, 64, 512, 4096):
    axes[1].annotate(
        f"{n}",
        (ratio[list(tokens).index(n)], 4.8 * min(ratio[list(tokens).index(n)], 989 / 4.8)),
        textcoords="offset points",
        xytext=(-4, 6),
        fontsize=8,
    )
axes[1].set(xscale="log", yscale="log", xlabel="operations for each byte", ylabel="TFLOP/s, at most")
axes[1].legend(fontsize=9)
plt.tight_layout()
table(["tokens", "experts read", "GB", "operations per byte"],
      [[int(n), float(used_experts(n)), intensity(n)[1] / 1e9, float(ratio[i])] for i, n in enumerate(tokens) if n in (1, 8, 64, 512, 4096)])  # fmt: skip

# %% [markdown]
# (Peaks: what the vendors state, 10.4 TFLOP/s and 989 TFLOP/s.) Decode sits at the far left, below 4 operations for each byte, on every
# device. A mixture of experts climbs slowly: until about 64 tokens each new token brings new experts with it, so bytes grow
# almost as fast as work. That is why 5 speculated tokens are not nearly free here (notebook 7), and why prefill and decode have
# kernels of their own.
#
# **To try:** set `top_k` to 1 in the ledger; find the context at which keys and values cost as much as all weights.
