"""The report from small made-up results: merging, refusals, plots."""

from __future__ import annotations

import json
import re

import pytest

from compare import peers, plots
from compare.report.figures import figures
from compare.report.sources import Group, Model, Point, least_bytes_at

from .report_folder import EMPTY, FULL, GPU, GREEN, LEAST, PEER, RED, cells, speed

# Merging


def numbers(speeds):
    return {point: {e: entry.row["tokens_per_s"] for e, entry in entries.items()} for point, entries in speeds.items()}


def test_the_newest_green_result_with_two_engines_wins(folder):
    """A ratio of speeds from two runs would compare two days."""
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 9.0), speed("decode", 256, "mlx_lm", 4.0)], commit="a")
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0), speed("decode", 256, "mlx_lm", 5.0)], commit="b")
    folder.add(
        "sweep", [speed("decode", 512, "lily_mlx", 15.0), speed("decode", 512, "mlx_lm", 6.0)], gate=RED, commit="b"
    )
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 20.0), speed("decode", 512, "lily_mlx", 17.0)], commit="b")
    folder.add("sweep", [speed("decode", 256, "mlx_lm", 7.0), speed("decode", 512, "lily_mlx", 18.0)], commit="c")
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 99.0)], gate=RED, commit="c")
    measurements = folder.measurements()
    assert numbers(measurements.speeds()[FULL]) == {
        Point("decode", 256): {"lily_mlx": 10.0, "mlx_lm": 5.0},
        Point("decode", 512): {"lily_mlx": 18.0},
    }
    assert measurements.earlier_pairs() == {}


def test_a_pair_of_an_earlier_commit_stands_apart(folder):
    """What another engine was measured against is no longer what the package is."""
    folder.add("sweep", [speed("prefill", 256, "lily_mlx", 10.0), speed("prefill", 256, "mlx_lm", 5.0)], commit="a")
    folder.add("sweep", [speed("prefill", 256, "lily_mlx", 30.0)], commit="b")
    measurements = folder.measurements()
    assert numbers(measurements.speeds()[FULL]) == {Point("prefill", 256): {"lily_mlx": 30.0}}
    assert numbers(measurements.earlier_pairs()[FULL]) == {Point("prefill", 256): {"lily_mlx": 10.0, "mlx_lm": 5.0}}
    page = folder.block("sweep")
    assert (
        page.index("30.00") < page.index("Side by side with another engine at an earlier commit") < page.index("5.00")
    )


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
