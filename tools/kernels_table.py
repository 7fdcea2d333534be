"""`python -m tools.kernels_table`: writes docs/kernels.md, a table of all kernels.

What a kernel computes comes from the head of its `.metal` file, launches and bytes from the exported graph of the
full-size model, evidence from docs/kernel_evidence.json. With --check nothing is written, and the exit status is 1 if
the page is not what these give. --record runs checks and notes their result as evidence:

    python -m tools.kernels_table --record front-end             # the C++ front end for Metal
    python -m tools.kernels_table --record checks --backend cuda  # the doctor's checks on a backend
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare.graph import Graph
from compare.launches import ByteCount
from compare.lily_trace import chunk_graph, decode_graph
from compare.results import table
from lily_mlx import kernels as package
from lily_mlx.metal import Kernel, use_backend, use_matrix_engine
from lily_mlx.metal.kernel import PACKAGE

from . import kernel_evidence
from .kernel_evidence import KINDS, Evidence

ROOT = Path(__file__).resolve().parents[1]
PAGE, EVIDENCE = Path("docs/kernels.md"), Path("docs/kernel_evidence.json")
CONTEXT, CHUNK = 4096, 2048

# The operations of MLX and mlx_lm that a kernel stands for, in the order in which mlx_lm's model calls them.
REPLACES = {
    "adjust": "`mlx_lm.sample_utils.make_logits_processors`: gather, scatter, arithmetic on the logits",
    "attention_append_blocks": "slice updates of `mlx_lm.models.cache.KVCache`",
    "attention_append_tail": "slice updates of `mlx_lm.models.cache.KVCache`",
    "attention_batch_combine": "the same as `attention_combine`, for a batch",
    "attention_batch_parts": "the same as `attention_step_parts` over `mlx_lm.models.cache.BatchKVCache`",
    "attention_combine": "second pass of `mx.fast.scaled_dot_product_attention`, sigmoid, multiply",
    "attention_merge_tail": "growth of `mlx_lm.models.cache.KVCache`, once in 128 steps",
    "attention_prefill": "`mx.fast.scaled_dot_product_attention`, transpose, sigmoid, multiply",
    "attention_prefill_parts": "first pass of `mx.fast.scaled_dot_product_attention`",
    "attention_prepare": "split, two `mx.fast.rms_norm`, two `mx.fast.rope`, transposes",
    "attention_step_parts": (
        "split, two `mx.fast.rms_norm`, two `mx.fast.rope`, two slice updates of the cache, "
        "first pass of `mx.fast.scaled_dot_product_attention`"
    ),
    "batch_adjust": "the same as `adjust`, in a loop over the sequences",
    "batch_draw": "the same as `draw`, in a loop over the sequences",
    "batch_select": "the same as `select`, in a loop over the sequences",
    "deltanet_gated_norm": "`mx.fast.rms_norm`, silu, multiply, casts",
    "deltanet_prepare": "concatenate, `mx.conv1d`, silu, two `mx.fast.rms_norm`, scale, softplus, exp, sigmoid",
    "deltanet_scan": "`mlx_lm.models.gated_delta.gated_delta_kernel`",
    "deltanet_short": "all of `deltanet_prepare`, `deltanet_scan` and `deltanet_gated_norm` for few rows",
    "deltanet_step": "all of `deltanet_prepare` and `deltanet_scan` for one token",
    "draw": "`mlx_lm.sample_utils.make_sampler`: sorts, cumulative sums, masks, `mx.random.categorical`",
    "embed": "three gathers, `mx.dequantize`",
    "gated_norm_project_add": "`mx.fast.rms_norm`, silu, multiply, `mx.quantized_matmul`, add",
    "head": "`mx.fast.rms_norm`, `mx.quantized_matmul`, logsumexp, and the reduction or the random draw",
    "matmul": "`mx.quantized_matmul` (several where their weights are joined), add",
    "mlp_gate_up_chunk": "two `mx.quantized_matmul`, SwiGLU",
    "mlp_gate_up_step": "`mx.fast.rms_norm`, two `mx.quantized_matmul`, SwiGLU",
    "mlp_tensor_gate_up_chunk": "the same as `mlp_gate_up_chunk`, with tensor operations",
    "moe_combine": "unsort, multiply, sum over the experts, the shared expert's gate, two adds",
    "moe_combine_norm": "the same as `moe_combine`, and `mx.fast.rms_norm`",
    "moe_experts_down": "`mx.gather_qmm`, `mx.quantized_matmul`, multiply, sum, the shared expert's gate, two adds",
    "moe_experts_gate_up": "`mx.fast.rms_norm`, softmax, argpartition, gather, normalise, "
    "two `mx.gather_qmm`, two `mx.quantized_matmul`, two SwiGLU",
    "moe_grouped_down": "`mx.gather_qmm` of sorted rows, `mx.quantized_matmul`",
    "moe_grouped_gate_up": "gather of rows, two `mx.gather_qmm`, two `mx.quantized_matmul`, two SwiGLU",
    "moe_map_blocks": "work that `mx.gather_qmm` does inside",
    "moe_route_rows": "softmax, argpartition, gather, normalise, sigmoid, two argsorts, divide, gather",
    "moe_select_experts": "softmax, argpartition, gather, normalise, sigmoid",
    "moe_sort_rows": "two argsorts, divide, gather",
    "moe_short_down": "the same as `moe_grouped_down`, for blocks of few rows",
    "moe_short_gate_up": "the same as `moe_grouped_gate_up`, for blocks of few rows",
    "moe_tensor_down": "the same as `moe_grouped_down`, with tensor operations",
    "moe_tensor_gate_up": "the same as `moe_grouped_gate_up`, with tensor operations",
    "norm_project": "`mx.fast.rms_norm`, `mx.quantized_matmul` (several where their weights are joined)",
    "project_add": "`mx.quantized_matmul`, add",
    "rms_norm": "`mx.fast.rms_norm`",
    "short_matmul": "the same as `matmul`, for few rows",
    "short_norm_matmul": "`mx.fast.rms_norm`, `mx.quantized_matmul`, for few rows",
    "tensor_matmul": "the same as `matmul`, with tensor operations",
    "select": "the end of `mx.argmax` or of the random draw",
}
# Where a kernel has no launch in the two traced workloads.
WHEN = {
    "adjust": "with penalties, a bias or filters",
    "attention_append_tail": "chunks that complete no block of 128 rows",
    "attention_merge_tail": "after every 128th step",
    "attention_batch_combine": "steps of several sequences",
    "attention_batch_parts": "steps of several sequences",
    "batch_adjust": "steps of several sequences",
    "batch_draw": "steps of several sequences, with top-p, min-p, top-k or XTC in one",
    "batch_select": "steps of several sequences without such filters",
    "deltanet_short": "chunks of few rows, steps of several sequences",
    "draw": "with top-p, min-p, top-k or XTC",
    "mlp_gate_up_chunk": "dense models",
    "mlp_gate_up_step": "dense models",
    "mlp_tensor_gate_up_chunk": "dense models, where the device has tensor operations",
    "moe_combine": "the last layer, where all rows are wanted",
    "moe_route_rows": "chunks of at most 64 rows",
    "moe_short_down": "chunks whose experts have few rows",
    "moe_short_gate_up": "chunks whose experts have few rows",
    "moe_tensor_down": "where the device has tensor operations",
    "moe_tensor_gate_up": "where the device has tensor operations",
    "short_matmul": "chunks of few rows",
    "short_norm_matmul": "chunks of at most 64 rows",
    "tensor_matmul": "where the device has tensor operations",
}
_TITLES = {
    "front end": "front end",
    "cpu": "CPU",
    "cuda": "NVIDIA GPU",
    "sanitizers": "sanitizers",
    "metal": "Apple GPU",
}


@dataclass(frozen=True)
class Row:
    """A kernel with what the page says about it.

    Attributes:
        step, chunk: launches and bytes in a decode step and in a prefill chunk; None where it has none.
    """

    family: str
    kernel: Kernel
    computes: str
    step: tuple[int, int] | None
    chunk: tuple[int, int] | None


def all_kernels() -> dict[str, tuple[str, Kernel]]:
    """Every kernel of the package with its family, by name."""
    found: dict[str, tuple[str, Kernel]] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        family = module.name.removeprefix(f"{package.__name__}.").split(".")[0]
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                found.setdefault(value.name, (family, value))
    return dict(sorted(found.items(), key=lambda item: (item[1][0], item[0])))


def description(path: Path) -> str:
    """What a kernel computes: the sentence at the head of its file, before the formulas and the grid."""
    words = []
    for line in path.read_text(encoding="ascii").splitlines():
        text = line.removeprefix("//")
        is_formula = text.startswith("   ") and words
        if not line.startswith("//") or not text.strip() or is_formula or re.match(r" (Grid|Bytes)\b", text):
            break
        words.append(text.strip())
    sentence = re.split(r"[.;](?=\s|$)", " ".join(words))[0]
    return sentence.strip(" :")


def rows() -> list[Row]:
    """All kernels, with the counts of a decode step and of a prefill chunk of the full-size model."""
    with use_matrix_engine("simdgroup"):  # the same page on every machine
        step = _counts(decode_graph(CONTEXT), ByteCount(1, CONTEXT))
        chunk = _counts(chunk_graph(CHUNK, CONTEXT), ByteCount(CHUNK, CONTEXT))
    return [
        Row(family, kernel, description(_body(kernel)), step.get(name), chunk.get(name))
        for name, (family, kernel) in all_kernels().items()
    ]


def _body(kernel: Kernel) -> Path:
    return Path(kernel.text.body_part.path)


def _counts(graph: Graph, count: ByteCount) -> dict[str, tuple[int, int]]:
    """Launches and bytes by kernel."""
    found: dict[str, tuple[int, int]] = {}
    for primitive in graph.launches:
        name = re.sub(r"^lily_(\w+?)_[0-9a-f]{12}(?:_.*)?$", r"\1", primitive.kernel_name)
        launches, moved = found.get(name, (0, 0))
        found[name] = launches + 1, moved + count(primitive)
    return found


def page(found: Sequence[Row], evidence: Evidence) -> str:
    """docs/kernels.md."""
    computes = [[_link(r.kernel), r.family, r.computes, REPLACES[r.kernel.name]] for r in found]
    moves = [[f"`{r.kernel.name}`", *_figures(r.step), *_figures(r.chunk), WHEN.get(r.kernel.name, "")] for r in found]
    shows = [[f"`{r.kernel.name}`", *(kernel_evidence.shown(evidence, k, r.kernel) for k in KINDS)] for r in found]
    total = [sum(r.step[0] for r in found if r.step), sum(r.chunk[0] for r in found if r.chunk)]
    sources = "\n".join(f"- {_TITLES[kind]}: {kernel_evidence.source(evidence, kind)}" for kind in KINDS)
    return f"""# Kernels

Written by `python -m tools.kernels_table`; `--check` says whether this page is up to date.

{len(found)} kernels do all the work of a step and of a chunk. The definition of each is in the `reference.py` of its
family; its `.metal` file says how the work is shared. A dash means that a kernel is not launched there.

## What they compute

{table(["kernel", "family", "computes", "replaces in mlx_lm's model"], computes)}

## Launches and bytes

Counted from the exported graph of Qwen3.6-35B-A3B in 4 bits, as it is launched on Apple devices: a decode step after
{CONTEXT:,} tokens ({total[0]} launches) and a chunk of {CHUNK:,} tokens after as many ({total[1]} launches). Bytes are those that
the launches read and write in all, each array once; experts that no token chooses do not count.

{table(["kernel", "launches, step", "MB, step", "launches, chunk", "MB, chunk", "launched elsewhere"], moves)}

## Evidence

"Not recorded" says that this file has no record of such a run, not that there was none. Nothing has been run on an
Apple GPU until the last column says so.

{table(["kernel", *(_TITLES[kind] for kind in KINDS)], shows)}

{sources}

The front end compiles the text that MLX would hand to Apple's compiler; it is not Apple's compiler. Checks compare a
kernel with its reference (`lily_mlx doctor`); on the CPU they run in checked mode, which finds accesses out of bounds,
reads of what nobody wrote, races and barriers that not all threads reach. The tests of the repository do more of the
same with more shapes, and `tests/fuzz` with random ones.
"""


def _link(kernel: Kernel) -> str:
    return f"[`{kernel.name}`](../{_body(kernel).relative_to(PACKAGE.parent)})"


def _figures(counts: tuple[int, int] | None) -> list[object]:
    return [None, None] if counts is None else [counts[0], counts[1] / 1e6]


def record(what: str, evidence: Evidence) -> Evidence:
    """Runs checks and returns the evidence with their result."""
    kernels: Mapping[str, Kernel] = {name: kernel for name, (_, kernel) in all_kernels().items()}
    if what == "front-end":
        return evidence | {kernel_evidence.FRONT_END: kernel_evidence.record_front_end(kernels)}
    backend, found = kernel_evidence.record_checks(kernels)
    return evidence | {backend: found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if the page is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernels_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    parser.add_argument("--record", choices=("front-end", "checks"), help="run checks and note them as evidence")
    parser.add_argument("--backend", choices=("metal", "cuda", "cpu"), help="where checks run")
    parser.add_argument("--evidence", type=Path, default=ROOT / EVIDENCE, help="the evidence file")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="take over the evidence of another file")
    parser.add_argument("--page", type=Path, default=ROOT / PAGE, help="the page")
    options = parser.parse_args(arguments)
    evidence = kernel_evidence.read(options.evidence)
    if options.merge:
        evidence = kernel_evidence.merge(evidence, kernel_evidence.read(options.merge))
    if options.record:
        if options.backend:
            with use_backend(options.backend):
                evidence = record(options.record, evidence)
        else:
            evidence = record(options.record, evidence)
    text = page(rows(), evidence)
    if options.check:
        is_current = options.page.exists() and options.page.read_text(encoding="utf-8") == text
        if not is_current:
            print(f"{options.page.name} is out of date: run python -m tools.kernels_table", file=sys.stderr)
        return 0 if is_current else 1
    if options.merge or options.record:
        kernel_evidence.write(options.evidence, evidence)
    options.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
