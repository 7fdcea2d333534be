"""README.md and docs/measurements.md from made-up results; and the committed pages are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compare.report.__main__ import ROOT, main
from compare.report.pages import replace_blocks
from compare.report.sources import ReportError

from .report_folder import GPU, README, cells, speed


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


def test_our_loop_and_mlx_lms_have_a_table_of_their_own(folder):
    """Beside another engine, our speed is that of the run with that engine."""
    pair = [speed("decode", 256, "lily_mlx", 10.0), speed("decode", 256, "mlx_lm", 5.0)]
    loops = [speed("decode", 256, "lily_mlx", 12.0), speed("decode", 256, "mlx_lm+lily_mlx", 8.0)]
    folder.add("sweep", pair, commit="a")
    folder.add("sweep", loops, commit="a")
    folder.add("sweep", [speed("decode", 512, "mlx_lm+lily_mlx", 8.0)])
    assert cells(folder.block("sweep"))[2] == ["decode", "256", "10.00", "5.00", "2.00", "1"]
    page = folder.report().pages[Path("docs/measurements.md")]
    section = page.split("## mlx-lm's loop on our kernels")[1].split("\n## ")[0]
    assert cells(section)[2:] == [["decode", "256", "12.00", "8.00", "+50.0 %", "1"]]


def test_streams_that_are_compared_are_of_one_run(folder):
    def rows(*pairs):
        return [
            {"phase": "decode", "streams": n, "length": 1024, "seconds": 0.01, "tokens_per_s": speed}
            for n, speed in pairs
        ]

    folder.add("batch", rows((2, 150.0), (1, 100.0)))
    folder.add("batch", rows((1, 200.0), (2, 300.0)))
    folder.add("batch", rows((2, 400.0)))
    lines = cells(folder.block("batch"))[2:]
    assert [(line[0], line[3]) for line in lines] == [("1", "200.0"), ("2", "300.0")]


def test_several_streams_and_the_first_token_are_shown(folder):
    folder.add_everything()
    block = folder.block("batch")
    assert cells(block)[2:] == [["4", "1,024", "8.00", "500.0", "125.0", "10.00", "1"]]
    assert "First token after 20 new tokens on 4,096 cached ones: 6.00 ms, 2.50 decode steps" in block


@pytest.mark.parametrize("device", [GPU, "CPU: small", "Apple M5 Max"])
def test_the_page_says_whether_apple_silicon_was_measured(folder, device):
    folder.add("sweep", [speed("decode", 256, "lily_mlx", 10.0, backend="cuda")], device=device)
    block = folder.block("devices")
    assert f"{device} (backend `cuda`)" in block
    assert ("Nothing was measured on Apple silicon yet" in block) == (not device.startswith("Apple"))


def test_an_empty_folder_names_the_commands(folder, capsys):
    folder.command()
    text = (folder.root / "README.md").read_text()
    for kind in ("sweep", "batch", "launches", "consistency", "ablations"):
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
