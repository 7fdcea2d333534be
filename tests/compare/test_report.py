"""The report from small made-up results: merging, refusals, pages, plots; and the committed pages are current."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from compare import peers, plots
from compare.report.__main__ import ROOT, Report, main
from compare.report.figures import figures
from compare.report.pages import readme_blocks, replace_blocks
from compare.report.sources import Group, Measurements, Model, Point, ReportError, least_bytes_at, read

GREEN = {"green": True, "checks": [{"name": "error", "value": 0.1, "limit": 0.2, "passed": True}]}
RED = {"green": False, "checks": [{"name": "error", "value": 0.3, "limit": 0.2, "passed": False}]}
EMPTY = {"green": False, "checks": []}
GPU = "NVIDIA H200"
FULL = Group(GPU, Model("synthetic"))
BLOCKS = ("devices", "plots", "sweep", "launches", "consistency", "ablations")
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


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def cells(markdown: str) -> list[list[str]]:
    """The cells of every table line."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in markdown.splitlines() if line.startswith("|")]


# Merging


def test_the_newest_green_result_with_two_engines_wins(folder):
    """A ratio of speeds from two runs would compare two days."""
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 9.0), speed("decode", 256, "mlx_lm", 4.0)])
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0), speed("decode", 256, "mlx_lm", 5.0)])
    folder.add("sweep", [speed("decode", 512, "lily_mlx", 15.0), speed("decode", 512, "mlx_lm", 6.0)], gate=RED)
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 20.0), speed("decode", 512, "lily_mlx", 17.0)])
    folder.add("sweep", [speed("decode", 256, "mlx_lm", 7.0), speed("decode", 512, "lily_mlx", 18.0)])
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 99.0)], gate=RED)
    speeds = folder.measurements().speeds()[FULL]
    assert {
        point: {e: entry.row["tokens_per_s"] for e, entry in entries.items()} for point, entries in speeds.items()
    } == {
        Point("decode", 256): {"lily_mlx": 10.0, "mlx_lm": 5.0},
        Point("decode", 512): {"lily_mlx": 18.0},
    }


def test_devices_and_models_do_not_mix(folder):
    row = [speed("decode", 256, "lily_mlx", 10.0)]
    folder.add("sweep", row)
    folder.add("sweep", row, device="Apple M5 Max")
    folder.add("sweep", row, settings={"model": "tiny"})
    folder.add("sweep", row, settings={"model": "synthetic", "layers": 4})
    folder.add("sweep", row, settings={"model": "/somewhere/Qwen3.6-35B-A3B-4bit"})
    assert set(folder.measurements().speeds()) == {
        FULL,
        Group("Apple M5 Max", Model("synthetic")),
        Group(GPU, Model("tiny")),
        Group(GPU, Model("synthetic", 4)),
        Group(GPU, Model("Qwen3.6-35B-A3B-4bit")),
    }


def test_the_order_of_files_does_not_matter_but_their_date_does(folder):
    newer = folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0)], name="-a")
    data = json.loads(newer.read_text())
    data["date"], data["rows"][0]["tokens_per_s"] = "2026-11-01T00:00:00Z", 77.0
    (folder.results / "z-older.json").write_text(json.dumps(data))
    assert folder.measurements().speeds()[FULL][Point("decode", 256)]["lily_mlx"].row["tokens_per_s"] == 10.0


def test_the_model_comes_from_the_command_where_no_settings_are_recorded(folder):
    row = {"engine": "lily_mlx", "baseline": "mlx_lm", "perplexity_ratio": 1, "top1_agreement": 1, "positions": 8}
    folder.add("consistency", [row], command="python -m compare.consistency --model synthetic --layers 4")
    ((_, result),) = folder.measurements().consistency()
    assert result.model({}, "tiny") == Model("synthetic", 4)


def test_kernels_of_several_files_merge(folder):
    def kernel(name, seconds):
        return {"name": name, "family": "linear", "seconds": seconds, "phase": "decode"}

    folder.add("kernels", [kernel("a", 1e-6), kernel("b", 2e-6), kernel("b", 3e-6)], copy_bytes_per_s=1e9)
    folder.add("kernels", [kernel("a", 5e-6)])
    measurements = folder.measurements()
    assert [(row["name"], row["seconds"]) for row, _ in measurements.kernels()[FULL]] == [
        ("a", 5e-6),
        ("b", 2e-6),
        ("b", 3e-6),
    ]
    assert measurements.rate(GPU, "copy_bytes_per_s")[0] == 1e9
    folder.add("kernels", [kernel("a", 9e-9)], settings={"small": True}, copy_bytes_per_s=7.0)
    folder.add("kernels", [kernel("a", 6e-6)], settings={"small": False}, ceilings={"copy_bytes_per_s": 2e9})
    measurements = folder.measurements()
    assert [row["seconds"] for row, _ in measurements.kernels()[FULL]] == [6e-6, 2e-6, 3e-6]
    assert [row["seconds"] for row, _ in measurements.kernels()[Group(GPU, Model("small"))]] == [9e-9]
    assert measurements.rate(GPU, "copy_bytes_per_s")[0] == 2e9
    assert measurements.rate("CPU", "copy_bytes_per_s") is None


def test_least_bytes_grow_with_the_context():
    assert least_bytes_at(LEAST, 100, 100) == 1200
    assert least_bytes_at(LEAST, 100, 0) == 1000
    assert least_bytes_at(LEAST, 100, 1000) == 3000


# Refusals


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (RED, "failed: error"),
        (EMPTY, "nothing was checked"),
        ({**GREEN, "green": False}, "it says so itself"),
        ({**RED, "green": True}, "failed: error"),
    ],
    ids=["failed check", "no checks", "red without a failed check", "green with a failed check"],
)
@pytest.mark.parametrize("kind", ["sweep", "kernels", "ablations"])
def test_a_red_gate_is_refused_by_name(folder, gate, reason, kind, capsys):
    row = {
        "sweep": speed("decode", 256, "lily_mlx", 123.5),
        "kernels": {"name": "qmv", "family": "linear", "seconds": 0.1235},
        "ablations": {"mechanism": "packing", "effect": 1.235},
    }[kind]
    path = folder.add(kind, [row], gate=gate)
    folder.command()
    assert f"refused: {path}: no speed is reported, its gate is not green ({reason})" in capsys.readouterr().err
    page = (folder.root / "docs/measurements.md").read_text()
    assert "123.5" not in page
    assert re.search(rf"\| \[`{path.name}`\].*\| {reason}", page)


def test_red_consistency_is_shown_as_red(folder):
    row = {"engine": "lily_mlx", "baseline": "mlx_lm", "perplexity_ratio": 1.5, "top1_agreement": 0.4, "positions": 8}
    folder.add("consistency", [row], gate=RED)
    assert any("1.50000" in line and "red: failed: error" in line for line in cells(folder.block("consistency")))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is no result: it lacks kind, date"),
        ({"kind": "poem"}, "kind 'poem', which is not one of sweep, kernels"),
        (
            {"rows": [{"phase": "decode", "length": 1, "engine": "x"}]},
            "row 0 lacks tokens_per_s; a sweep row has these",
        ),
        ({"rows": [speed("decode", 1, "x", float("nan"))]}, "row 0 has nan tokens/s"),
        ({"rows": [speed("decode", 1, "x", 0)]}, "row 0 has 0 tokens/s"),
        ({"rows": [speed("decode", 1, "x", 1), speed("decode", 1, "x", 2)]}, "has x decode at 1 twice"),
        (
            {"kind": "ablations", "rows": [{"mechanism": "m", "effect": 20.0, "with": 120, "without": 100}]},
            "the effect 20.0 with 120 and without 100; an effect is a fraction",
        ),
    ],
    ids=["no JSON", "no object", "kind", "missing field", "not a number", "zero", "twice", "effect in percent"],
)
def test_a_broken_file_is_named(folder, content, words):
    path = folder.add("sweep", [])
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(content)
    with pytest.raises(SystemExit, match=re.escape(words)) as error:
        folder.command()
    assert path.name in str(error.value)
    assert not (folder.root / "docs").exists()


# Pages


def test_only_the_blocks_of_the_readme_change(folder):
    folder.add_everything()
    folder.command()
    text = (folder.root / "README.md").read_text()
    assert re.sub(r"(<!-- generated: \w+ -->\n).*?(<!-- end)", r"\1old\n\2", text, flags=re.DOTALL) == README
    assert "\nold\n" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.replace("<!-- generated: sweep -->\nold\n<!-- end -->", ""),
            "no place for sweep; add these lines",
        ),
        (lambda t: t.replace("generated: sweep", "generated: weather"), "nothing generates a block 'weather'"),
        (lambda t: t.replace("generated: sweep", "generated: devices"), "the block 'devices' stands there twice"),
        (lambda t: t.replace("old\n<!-- end -->", "", 1), "the block 'devices' is not closed"),
        (lambda t: "<!-- end -->\n" + t, "has no '<!-- generated: ... -->' before it"),
        (lambda t: "nothing", "no place for devices, plots, sweep"),
    ],
    ids=["missing", "unknown", "twice", "not closed", "end first", "none"],
)
def test_wrong_markers_are_named(folder, change, words):
    readme = folder.root / "README.md"
    readme.write_text(change(README))
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0)])
    with pytest.raises(SystemExit, match=re.escape(words)):
        folder.command()
    assert readme.read_text() == change(README)


def test_replacing_a_block_keeps_the_text_around():
    text = "a\n<!-- generated: x -->\n1\n<!-- end -->\nb"
    assert replace_blocks(text, {"x": "2"}, "page") == "a\n<!-- generated: x -->\n\n2\n\n<!-- end -->\nb"
    with pytest.raises(ReportError, match="page has no place for y"):
        replace_blocks(text, {"x": "2", "y": "3"}, "page")


def test_the_sweep_table_holds_engines_ratios_and_sources(folder):
    folder.add_everything()
    block = folder.block("sweep")
    heading, _, *lines = cells(block)
    assert heading == [
        "phase",
        "length",
        "lily_mlx",
        "mlx_lm",
        "mlx_lm+metal",
        "llama.cpp (measured elsewhere)",
        "ratio to mlx_lm",
        "ratio to mlx_lm+metal",
        "ratio to llama.cpp",
        "source",
    ]
    assert lines[0] == ["prefill", "256", "512.0", "256.0", "384.0", "700.0", "2.00", "1.33", "0.73", "1, 2"]
    assert [line[:2] for line in lines] == [
        ["prefill", "256"],
        ["prefill", "512"],
        ["decode", "256"],
        ["decode", "512"],
    ]
    assert "Mean ratio to mlx_lm: prefill 2.00 (2 lengths), decode 2.00 (2 lengths)." in block
    assert "Decode starts from caches of random values" in block
    assert "2026-12-01 10:00, NVIDIA H200, commit commit01, mlx 9.1, mlx-lm 9.2" in block
    assert "llama.cpp 1.2 (commit abc123), CUDA build. Measured separately" in block


def test_every_table_of_the_document_is_filled(folder):
    folder.add_everything()
    page = folder.report().pages[Path("docs/measurements.md")]
    assert "No result of kind" not in page
    lines = cells(page)
    assert ["decode", "100", "1", "mlx_lm", "1,799", "1,798", "1.00", "0", "1"] in lines
    assert ["decode", "-", "1", "article (its own count)", "795", "555", "-", "-", "1"] in lines
    assert ["linear", "qmv", "decode", "N 64", "3", "2.00", "4.00", "0.50", "50.00", "1.0e-03", "1"] in lines
    assert ["decode", "1", "4,096", "1.00", "2.00", "1"] in lines
    assert ["packing (decode, 32K)", "120.0", "100.0", "+20.0 %", "+30.0 %", "+23.8 %", "1"] in lines
    assert ["chunking", "-", "-", "memory", "-", "memory", "1"] in lines
    assert "Refused in [1]: tiles at 512: too far from the engine" in page
    assert any(line[4:7] == ["192", "1.00012", "97.00"] for line in lines)
    assert any(line[2] == "the article" and line[5] == "1.00040" for line in lines if len(line) > 5)
    # 1,000 bytes and 2 for each token, at 1 GB/s, against 512 tokens/s.
    floor = (1000 + 2 * 256) / 1e9 * 512
    assert any(line[:2] == ["256", "lily_mlx"] and line[5] == f"{100 * floor:.2f}" for line in lines)
    # The full page holds a peer's other lengths too.
    assert any(line[:2] == ["prefill after 4,096", "20"] for line in lines)
    assert any(line[:2] == ["decode", "0"] for line in lines)


@pytest.mark.parametrize("device", [GPU, "CPU: small", "Apple M5 Max"])
def test_the_page_says_whether_apple_silicon_was_measured(folder, device):
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0, backend="cuda")], device=device)
    block = folder.block("devices")
    assert f"{device} (backend `cuda`)" in block
    assert ("Nothing was measured on Apple silicon yet" in block) == (not device.startswith("Apple"))


def test_an_empty_folder_names_the_commands(folder, capsys):
    folder.command()
    text = (folder.root / "README.md").read_text()
    for kind in ("sweep", "launches", "consistency", "ablations"):
        assert f"No result of kind `{kind}` yet; `python -m compare.{kind}` makes one." in text
    assert "missing: no plot of launches and stages" in capsys.readouterr().err


def test_check_fails_until_the_report_is_written(folder, capsys):
    folder.add_everything()
    with pytest.raises(SystemExit, match=r"out of date: README.md, docs/measurements.md, docs/plots/prefill") as error:
        folder.command("--check")
    assert isinstance(error.value.code, str)  # printed, and status 1
    assert not (folder.root / "docs").exists()
    folder.command()
    folder.command("--check")
    assert "are what the result files give" in capsys.readouterr().out
    folder.command()
    assert "nothing changed" in capsys.readouterr().out

    (folder.root / "README.md").write_text((folder.root / "README.md").read_text().replace("512.0", "612.0"))
    with pytest.raises(SystemExit, match=r"out of date: README.md; run"):
        folder.command("--check")
    folder.command()

    folder.add("sweep", [speed("decode", 256, "lily_mlx", 600.0), speed("decode", 256, "mlx_lm", 50.0)])
    with pytest.raises(SystemExit, match="docs/plots/decode-nvidia-h200"):
        folder.command("--check")


def test_plots_without_data_are_removed(folder):
    folder.add_everything()
    folder.command()
    mine = folder.root / "docs/plots/by-hand.png"
    mine.write_bytes(b"not generated")
    next(folder.results.glob("*ablations*")).unlink()
    with pytest.raises(SystemExit, match=r"docs/plots/ablations-nvidia-h200\.png"):
        folder.command("--check")
    folder.command()
    names = {path.name for path in (folder.root / "docs/plots").iterdir()}
    assert mine.name in names
    assert not any(name.startswith("ablations") for name in names)
    folder.command("--check")


def test_the_committed_pages_are_what_the_files_give():
    """After a new result file: `python -m compare.report`."""
    main(["--check"])
    assert (ROOT / "docs/measurements.md").exists()


# Plots


def test_every_plot_is_made(folder):
    folder.add_everything()
    found = figures(folder.measurements())
    assert found.missing == []
    by_name = {plot.name: plot for plot in found.plots}
    assert list(by_name) == [
        "prefill-nvidia-h200",
        "decode-nvidia-h200",
        "ratio-nvidia-h200",
        "floor-nvidia-h200",
        "launches",
        "ablations-nvidia-h200",
    ]
    prefill = {series.engine: series for series in by_name["prefill-nvidia-h200"].series}
    assert prefill["lily_mlx"].x == (256, 512)
    assert prefill["lily_mlx"].y == (512.0, 1024.0)
    assert prefill["lily_mlx"].low == pytest.approx((460.8, 921.6))
    peer = prefill["llama.cpp"]
    assert (peer.label, peer.dashed, peer.x) == ("llama.cpp (measured elsewhere)", True, (256, 512))
    assert not any(series.dashed for engine, series in prefill.items() if engine != "llama.cpp")
    ratios = {series.label: series.y for series in by_name["ratio-nvidia-h200"].series}
    assert ratios["decode, to mlx_lm"] == (2.0, 2.0)
    shares = {series.engine: series.y for series in by_name["floor-nvidia-h200"].series}
    assert shares["mlx_lm"] == pytest.approx((1512e-9 * 256, 2024e-9 * 512))
    assert "llama.cpp" not in shares
    assert by_name["launches"].categories == ("lily_mlx", "mlx_lm", "article")
    assert [bars.values for bars in by_name["launches"].bars] == [(263, 1799, 795), (262, 1798, 555)]
    assert by_name["ablations-nvidia-h200"].categories == ("packing (decode, 32K)",)
    assert [bars.values for bars in by_name["ablations-nvidia-h200"].bars] == [
        (20.0,),
        (30.0,),
        (pytest.approx(23.8),),
    ]


@pytest.mark.parametrize("kind", ["kernels", "launches", "ablations", "sweep"])
def test_a_missing_kind_leaves_its_plot_out_and_names_the_command(folder, kind):
    folder.add_everything()
    complete = len(figures(folder.measurements()).plots)
    next(folder.results.glob(f"*-{kind}.json")).unlink()
    found = figures(folder.measurements())
    assert len(found.plots) < complete
    assert any(f"kind '{kind}'" in m and f"`python -m compare.{kind}`" in m for m in found.missing)


def test_plots_are_drawn_alike_every_time(folder):
    pytest.importorskip("matplotlib")
    folder.add_everything()
    drawn = figures(folder.measurements()).plots
    for plot in drawn:
        first, second = (plots.save(plot, folder.root / name) for name in ("first", "second"))
        assert [path.suffix for path in first] == [".png", ".svg"]
        for a, b in zip(first, second, strict=True):
            assert a.read_bytes() == b.read_bytes()
            assert plots.stored_fingerprint(a) == plots.fingerprint(plot)
        svg = first[1].read_text()
        assert "<dc:date>" not in svg
        assert "Matplotlib v" not in svg


def test_a_plot_has_its_own_background(folder):
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import image

    folder.add_everything()
    png, svg = plots.save(figures(folder.measurements()).plots[0], folder.root)
    pixels = image.imread(png)
    assert pixels.shape[1] == plots.WIDTH_INCHES * plots.PNG_DPI
    assert pixels[10, 10, :3] == pytest.approx(matplotlib.colors.to_rgb(plots.BACKGROUND), abs=0.01)
    assert pixels[..., 3].min() == 1.0
    assert plots.BACKGROUND in svg.read_text()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    ("colour", "least"),
    [(plots.TEXT, 7.0), *((c, 3.0) for c in (*plots.COLOURS.values(), *plots.OTHER_COLOURS))],
)
def test_colours_stand_out_from_the_background(colour, least):
    """Contrast as WCAG 2 defines it: 7 for text, 3 for lines."""
    assert (luminance(plots.BACKGROUND) + 0.05) / (luminance(colour) + 0.05) >= least


def test_a_fingerprint_changes_with_the_data(folder):
    folder.add_everything()
    before = {plot.name: plots.fingerprint(plot) for plot in figures(folder.measurements()).plots}
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 600.0), speed("decode", 256, "mlx_lm", 50.0)])
    after = {plot.name: plots.fingerprint(plot) for plot in figures(folder.measurements()).plots}
    changed = {name for name, mark in after.items() if mark != before[name]}
    assert changed == {"decode-nvidia-h200", "ratio-nvidia-h200", "floor-nvidia-h200"}


# Peers


def test_a_peer_is_converted():
    result = peers.convert(PEER)
    assert result["versions"] == {"llama.cpp": "1.2 (commit abc123), CUDA build"}
    assert result["commit"] == "abc123 of llama.cpp"
    assert "did not run it" in result["source"]
    assert speed("decode", 0, "llama.cpp", 240.0) in result["rows"]
    assert speed("prefill", 20, "llama.cpp", 100.0, context=4096) in result["rows"]
    assert len(result["rows"]) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "sweep"}, "kind is 'sweep', not 'peer'"),
        ({"device": None}, "the field 'device' is missing or no text"),
        ({"speed": 3}, "the field 'speed' is unknown; known are engine"),
        ({"prefill_tokens_per_s": {"8": -1.0}}, "prefill at 8: -1.0 is no speed"),
        ({"prefill_tokens_per_s": {"many": 1.0}}, "many"),
    ],
    ids=["kind", "missing", "unknown", "negative", "no length"],
)
def test_a_wrong_peer_is_refused(tmp_path, change, words):
    path = tmp_path / "peer.json"
    path.write_text(json.dumps({**PEER, **change}))
    with pytest.raises(SystemExit, match=words) as error:
        peers.main([str(path), "--results", str(tmp_path / "results")])
    assert str(path) in str(error.value)
    assert not (tmp_path / "results").exists()
