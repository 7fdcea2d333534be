# %% [markdown]
# # Write a kernel
#
# You need no GPU for this. In ten minutes you will write a kernel in the Metal language, run it on the CPU, let the checks
# catch two mistakes, compare it with a definition in NumPy, and then change a kernel of the engine.
#
# The operation: a gated residual, $\text{out} = \text{residual} + \sigma(\text{gate}) \cdot x$, for rows of bfloat16.

# %%
import numpy as np
from lib import *
from lily_mlx.metal import Kernel, KernelError, checked

use_cpu()

# %% [markdown]
# ## First the definition
#
# No tricks, float64. Whatever the kernel does, this is what it means.


# %%
def gated_add(x, gate, residual):
    return residual + x / (1 + np.exp(-gate))


generator = np.random.default_rng(0)
ROWS, COLUMNS = 5, 100  # odd sizes find mistakes
x, gate, residual = (bf16(generator.normal(size=(ROWS, COLUMNS))) for _ in range(3))
want = gated_add(*(to_numpy(a) for a in (x, gate, residual)))

# %% [markdown]
# ## Then the text
#
# A body is what stands between the braces of a Metal kernel. The arrays have the names that you give below, `x_shape` is the
# shape of `x`, and attributes such as `thread_position_in_grid` are there when you use them. bfloat16 is converted by
# hand in both directions; arithmetic is in float.

# %%
BODY = """
const uint i = thread_position_in_grid.x;
const float sigmoid = 1.0f / (1.0f + metal::exp(-float(gate[i])));
out[i] = bfloat(float(residual[i]) + sigmoid * float(x[i]));
"""


def run(body, threads=128):
    """Launches a body over all elements, rounded up to whole threadgroups."""
    kernel = Kernel.from_source("gated_add", ["x", "gate", "residual"], ["out"], body)
    size = -(-x.size // threads) * threads
    (out,) = kernel(
        [x, gate, residual],
        grid=(size, 1, 1), threadgroup=(threads, 1, 1),
        output_shapes=[x.shape], output_dtypes=[mx.bfloat16],
    )  # fmt: skip
    return out


print(f"relative error: {relative_error(run(BODY, threads=100), want):.1e}")

# %% [markdown]
# ## The first mistake
#
# 500 elements in threadgroups of 100 came out even. In threadgroups of 128 there are 512 threads, and 12 of them have no
# element. On a GPU they would read and write whatever lies behind the array, and most days nothing would happen. The
# checked mode looks at each access:

# %%
try:
    with checked():
        run(BODY, threads=128)
    print("no finding")
except KernelError as error:
    print(error)

# %% [markdown]
# The remedy is one line. `x_shape` holds sizes that are known only at run time:

# %%
FIXED = """
const uint i = thread_position_in_grid.x;
if (i < uint(x_shape[0] * x_shape[1])) {
  const float sigmoid = 1.0f / (1.0f + metal::exp(-float(gate[i])));
  out[i] = bfloat(float(residual[i]) + sigmoid * float(x[i]));
}
"""
with checked():
    out = run(FIXED)
print(f"relative error: {relative_error(out, want):.1e}")
assert relative_error(out, want) < 4e-3

# %% [markdown]
# ## The second mistake
#
# Threads of a threadgroup can talk through threadgroup memory, if they wait for each other. Here each row's sum of squares is
# made by 32 threads, and the wait is missing:

# %%
RACE = """
threadgroup float partial[32];
const uint lane = thread_index_in_threadgroup;
const uint row = threadgroup_position_in_grid.x;
const int columns = x_shape[1];
float sum = 0.0f;
for (int c = int(lane); c < columns; c += 32) {
  sum += float(x[row * columns + c]) * float(x[row * columns + c]);
}
partial[lane] = sum;
BARRIER
if (lane == 0) {
  float total = 0.0f;
  for (int i = 0; i < 32; ++i) {
    total += partial[i];
  }
  out[row] = total;
}
"""


def squares(body):
    kernel = Kernel.from_source("squares", ["x"], ["out"], body)
    return kernel(
        [x], grid=(32 * ROWS, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(ROWS,)], output_dtypes=[mx.float32]
    )[0]


for barrier in ("", "threadgroup_barrier(mem_flags::mem_threadgroup);"):
    try:
        with checked():
            error = relative_error(squares(RACE.replace("BARRIER", barrier)), (to_numpy(x) ** 2).sum(1))
        print(f"with the barrier, relative error: {error:.1e}")
    except KernelError as finding:
        print(finding, "\n")

# %% [markdown]
# (`simd_sum(sum)` would do the same in one line, without threadgroup memory. That is what the kernels here do.)
#
# ## Would Apple's compiler take it?
#
# The CPU is forgiving: it has one address space. Metal has four, and a pointer must say which. A front end (libclang, in its C++
# for OpenCL mode) parses the exact text that MLX would hand to Apple's compiler. It is not Apple's compiler, but it knows the
# rules that people break most. A helper whose parameter forgets its address space:

# %%
HELPER = "inline float load(ADDRESS const bfloat* p, uint i) { return float(p[i]); }\n"
USES = "const uint i = thread_position_in_grid.x;\nif (i < uint(x_shape[0] * x_shape[1])) { out[i] = load(x, i); }\n"

for address in ("", "device"):
    kernel = Kernel.from_source(
        "copy", ["x"], ["out"], USES, header=HELPER.replace("ADDRESS ", address + " " if address else "")
    )

    def launch(a, kernel=kernel):
        return kernel(
            [a], grid=(512, 1, 1), threadgroup=(128, 1, 1), output_shapes=[a.shape], output_dtypes=[mx.float32]
        )

    findings = front_end_findings(launch, [x])
    print(repr(address), "->", findings[0] if findings else "passed")

# %% [markdown]
# ## Now change a kernel of the engine
#
# `rms_norm.metal` is one of the shortest. A threadgroup takes a row in pieces of 8 values, because 16 bytes are the
# widest load:

# %%
path = ROOT / "lily_mlx/kernels/linear/rms_norm.metal"
print(path.read_text())

# %% [markdown]
# An idea to try: `squares` is one chain of additions, each waiting for the one before. Two chains could overlap.
# Change the text, keep the rest, and compare both with the definition on 64 rows of the width of Qwen3.6:

# %%
from lily_mlx.kernels.linear import reference

original = path.read_text()
changed = (
    original.replace("float squares = 0.0f;\n", "float squares = 0.0f;\nfloat more = 0.0f;\n")
    .replace(
        "      squares = metal::fma(values[i], values[i], squares);",
        "      if (i % 2) { more = metal::fma(values[i], values[i], more); } else { squares = metal::fma(values[i], values[i], squares); }",
    )
    .replace("threadgroup_sum<SIMDGROUPS>(squares,", "threadgroup_sum<SIMDGROUPS>(squares + more,")
)
assert changed.count("more") == 4
header = "".join((ROOT / "lily_mlx/metal/include" / name).read_text() for name in ("quantized.h", "reduce.h"))

M, K = 64, 2048
rows, gain = bf16(generator.normal(size=(M, K))), bf16(generator.uniform(0.5, 1.5, K))
expected = reference.rms_norm(to_numpy(rows), to_numpy(gain), 1e-6)


def rms_norm(text):
    kernel = Kernel.from_source("rms_norm", ["x", "weight"], ["out"], text, header=header)

    def launch(a, w):
        return kernel([a, w], template={"K": K, "SIMDGROUPS": 4, "EPS": 1e-6}, grid=(128 * M, 1, 1), threadgroup=(128, 1, 1),
                      output_shapes=[a.shape], output_dtypes=[mx.bfloat16])  # fmt: skip

    return launch


results = {}
for name, text in (("original", original), ("two chains", changed)):
    with checked():
        (results[name],) = rms_norm(text)(rows, gain)
    findings = front_end_findings(rms_norm(text), [rows, gain])
    print(f"{name:10}  error {relative_error(results[name], expected):.1e}  front end: {findings or 'passed'}")
differ = np.mean(to_numpy(results["original"]) != to_numpy(results["two chains"]))
print(f"outputs that differ in a bit: {differ:.4%}")

# %% [markdown]
# Both are right: the other order of addition changes the sum in its last float32 digits, which bfloat16 hardly ever shows. Which
# one is faster? The CPU cannot say; only a measurement on the device can (`python -m compare.kernels --help`). Last, the
# error of each value against the definition *before* it is rounded. It is the rounding to bfloat16 and nothing else:

# %%
unrounded = to_numpy(rows) / np.sqrt(np.mean(to_numpy(rows) ** 2, -1, keepdims=True) + 1e-6) * to_numpy(gain)
for name, colour, style in (("original", BLUE, "-"), ("two chains", ORANGE, "--")):
    error = np.abs(to_numpy(results[name]) - unrounded) / np.abs(unrounded)
    plt.hist(error.ravel(), bins=80, range=(0, 2**-7.8), histtype="step", color=colour, label=name, linestyle=style)
plt.axvline(2**-8, color=GREY, linestyle=":", label="the largest error of rounding, $2^{-8}$")
plt.gca().set(xlabel="relative error of a value", ylabel="values")
plt.legend(fontsize=9)
assert max((np.abs(to_numpy(r) - unrounded) / np.abs(unrounded)).max() for r in results.values()) < 1.01 * 2**-8

# %% [markdown]
# ## In the repository
#
# Edit `lily_mlx/kernels/linear/rms_norm.metal` in place, then:
#
# ```sh
# python -m pytest tests/kernels/linear -q             # compare with reference.py, in checked mode
# python -m lily_mlx.metal.check --quick --kernel rms_norm     # the front end, all instantiations
# make demo                                            # does it still write?
# ```
#
# A new kernel needs a `.metal` file, a wrapper that checks its arguments, and a definition in `reference.py`:
# see `docs/adding_a_kernel.md`.
