"""A made-up repository with result files, for the tests of the report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from compare import peers
from compare.report.__main__ import Report, main
from compare.report.figures import figures
from compare.report.pages import readme_blocks
from compare.report.sources import Group, Measurements, Model, read

GREEN = {"green": True, "checks": [{"name": "error", "value": 0.1, "limit": 0.2, "passed": True}]}
RED = {"green": False, "checks": [{"name": "error", "value": 0.3, "limit": 0.2, "passed": False}]}
EMPTY = {"green": False, "checks": []}
GPU = "NVIDIA H200"
FULL = Group(GPU, Model("synthetic"))
BLOCKS = ("devices", "plots", "sweep", "batch", "launches", "consistency", "ablations")
README = (
    "# Title\n\nBefore.\n" + "".join(f"\n<!-- generated: {b} -->\nold\n<!-- end -->\n" for b in BLOCKS) + "\nAfter.\n"
)

LEAST = {"weights": 1000.0, "keys and values": 200.0}
PEER = {
    "kind": "peer",
    "engine": "llama.cpp 1.2 (commit abc123), CUDA build",
    "date": "2026-11-30",
    "device": GPU,
    "model": "the same shapes, Q4_0",
    "command": "llama-bench",
    "prefill_tokens_per_s": {"8": 90.0, "256": 700.0, "512": 800.0},
    "prefill_20_at_depth_4096_tokens_per_s": 100.0,
    "decode_tokens_per_s_at_depth": {"0": 240.0, "256": 230.0},
}


def speed(phase, length, engine, tokens_per_s, **more):
    return {"phase": phase, "length": length, "engine": engine, "tokens_per_s": tokens_per_s, **more}


class Folder:
    """A made-up repository: README.md and a folder of results, each a day newer than the one before."""

    def __init__(self, root: Path):
        self.root, self.results = root, root / "compare/results"
        self.results.mkdir(parents=True)
        (root / "README.md").write_text(README)
        self._days = itertools.count(1)

    def add(self, kind, rows, *, gate=GREEN, device=GPU, name="", **more) -> Path:
        date = f"2026-12-{next(self._days):02d}T10:00:00Z"
        path = self.results / f"{date[:10]}-{kind}{name}.json"
        result = {
            "kind": kind,
            "date": date,
            "commit": f"commit{date[8:10]}",
            "command": f"python -m compare.{kind}",
            "device": device,
            "os": "an OS",
            "versions": {"mlx": "9.1", "mlx-lm": "9.2", "lily_mlx": "not installed"},
            "seed": 0,
            "gate": gate,
            **more,
            "rows": rows,
        }
        path.write_text(json.dumps(result))
        return path

    def add_everything(self) -> None:
        rows = [
            speed(
                phase, length, engine, scale * length, rounds=[0.9 * scale * length, 1.1 * scale * length], spread=0.2
            )
            for phase in ("prefill", "decode")
            for length in (256, 512)
            for engine, scale in (("lily_mlx", 2.0), ("mlx_lm", 1.0), ("mlx_lm+metal", 1.5))
        ]
        self.add("sweep", rows, settings={"model": "synthetic", "synthetic_context": True, "layers": None})
        counts = [
            {"engine": e, "phase": p, "launches": n, "stages": n - 1, "bytes": 10**9, "other_ops": 0}
            for e, n in (("lily_mlx", 263), ("mlx_lm", 1799))
            for p in ("prefill", "decode")
        ]
        self.add(
            "launches",
            counts,
            gate=EMPTY,
            device="CPU: small",
            context=100,
            chunk=2048,
            minimum_bytes=LEAST,
            published={"article": {"launches": 795, "stages": 555}},
        )
        kernel = {"name": "qmv", "family": "linear", "phase": "decode", "shape": {"N": 64}, "calls_per_step": 3}
        kernel |= {"seconds": 2e-6, "bytes_per_s": 5e8, "share_of_copy": 0.5, "mlx_ops_seconds": 4e-6, "error": 1e-3}
        total = {"phase": "decode", "rows": 1, "context": 4096, "seconds": 1e-3, "mlx_ops_seconds": 2e-3}
        self.add("kernels", [kernel], copy_bytes_per_s=1e9, matrix_flops_per_s=1e12, summary=[total])
        ablation = {"mechanism": "packing", "phase": "decode", "length": 32768, "with": 120.0, "without": 100.0}
        memory = {"mechanism": "chunking", "effect": "memory", "article_effect": "memory"}
        packing = {**ablation, "effect": 0.2, "effect_of_control": 0.3, "article_effect": 0.238}
        self.add("ablations", [packing, memory], refused=["tiles at 512: too far from the engine"])
        figures = {"perplexity_ratio": 1.00012, "top1_agreement": 0.97, "positions": 192, "gap_median": 0.1}
        article = {"perplexity_ratio": 1.0004, "top1_agreement": 0.9635, "positions": 192}
        row = {"engine": "lily_mlx", "baseline": "mlx_lm", **figures}
        self.add("consistency", [row], device="CPU: small", settings={"model": "tiny"}, article=article)
        streams = {"streams": 4, "length": 1024, "seconds": 0.008, "tokens_per_s": 500.0, "spread": 0.1}
        first = {"streams": 1, "length": 4096, "seconds": 0.006, "tokens_per_s": 1 / 0.006, "suffix": 20}
        self.add("batch", [{"phase": "decode", **streams}, {"phase": "first token", **first, "decode_steps": 2.5}])
        (self.root / "peer.json").write_text(json.dumps(PEER))
        peers.main([str(self.root / "peer.json"), "--results", str(self.results)])

    def measurements(self) -> Measurements:
        return Measurements.of(read(self.results))

    def report(self) -> Report:
        return Report.of(self.results, self.root)

    def command(self, *arguments: str) -> None:
        if "--check" not in arguments:
            pytest.importorskip("matplotlib")
        main(["--root", str(self.root), "--results", str(self.results), *arguments])

    def block(self, name: str) -> str:
        measurements = self.measurements()
        return readme_blocks(measurements, figures(measurements), self.root)[name]


def cells(markdown: str) -> list[list[str]]:
    """The cells of every table line."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in markdown.splitlines() if line.startswith("|")]
