"""compute-sanitizer's logs: what counts as an error, whose it is, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu" / "sanitize.py"
specification = importlib.util.spec_from_file_location("sanitize", SCRIPT)
sanitize = importlib.util.module_from_spec(specification)
specification.loader.exec_module(sanitize)

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
BAD = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at lily::load_codes(const unsigned int *)+0x40 in quantized.h:40
=========     by thread (3,0,0) in block (7,0,0)
=========         Device Frame: mlx::core::cu::custom_kernel_lily_norm_project_0123456789abcdef()
=========
========= Invalid __global__ write of size 2 bytes
=========     at custom_kernel_lily_norm_project_0123456789abcdef+0x10
=========
========= ERROR SUMMARY: 2 errors
"""
COPY = """========= Host API memory access error at host access to 0x48ea0b3600 of size 16,384 bytes
=========     Uninitialized access to 0x48ea0b5a00 on access by cudaMemcpy source
=========
"""
MLX = """========= Uninitialized __global__ memory read of size 16 bytes
=========     at void mlx::core::cu::copy_v<__nv_bfloat16, float, unsigned int, (int)8>(const T1 *, T2 *, T3)+0x80
=========     by thread (1,0,0) in block (0,0,0)
=========
"""


@pytest.mark.parametrize(
    ("log", "errors", "by_kernel"),
    [
        pytest.param(MLX + CLEAN.replace("0", "1"), 0, {}, id="a-read-of-mlx"),
        pytest.param(MLX.replace("Uninitialized", "Invalid") + CLEAN.replace("0", "1"), 1, {}, id="a-fault-of-mlx"),
        pytest.param(MLX + BAD.replace("SUMMARY: 2", "SUMMARY: 3"), 2, {"norm_project": 2}, id="mlx-and-reports"),
        pytest.param(COPY + CLEAN.replace("0", "1"), 0, {}, id="a-copy-to-the-host"),
        pytest.param(COPY + BAD.replace("SUMMARY: 2", "SUMMARY: 3"), 2, {"norm_project": 2}, id="a-copy-and-reports"),
        pytest.param(CLEAN, 0, {}, id="clean"),
        pytest.param(RACES, 0, {}, id="clean-racecheck"),
        pytest.param(BAD, 2, {"norm_project": 2}, id="two-reports-of-one-kernel"),
        pytest.param("========= COMPUTE-SANITIZER\n", None, {}, id="ended-early"),
    ],
)
def test_a_log_names_the_kernels_at_fault(log, errors, by_kernel):
    assert sanitize.reports(log) == (errors, by_kernel)


def test_a_kernel_is_clean_only_by_the_tools_that_ran():
    found = {"memcheck": {"norm_project": 2}, "synccheck": {}}
    assert sanitize.results(["embed", "norm_project"], found) == {
        "embed": "clean (memcheck, synccheck)",
        "norm_project": "memcheck: 2 reports",
    }


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A compute-sanitizer that writes the log and prints the words it is told to."""

    def make(log: str, printed: str) -> Path:
        program = tmp_path / "compute-sanitizer"
        program.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\n"
            f"pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text({log!r})\nprint({printed!r})\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(program))
        return tmp_path

    return make


def said(failed: list[str]) -> str:
    return json.dumps({"kernels": ["embed", "norm_project"], "failed": failed})


@pytest.mark.parametrize(
    ("log", "printed", "problem"),
    [
        pytest.param(CLEAN, said([]), None, id="clean"),
        pytest.param(BAD, said([]), "2 errors, of which 2 name a kernel of ours", id="errors"),
        pytest.param(
            CLEAN.replace("0", "3"), said([]), "3 errors, of which 0 name a kernel of ours", id="errors-of-nobody"
        ),
        pytest.param(CLEAN, said(["embed [3]: wrong"]), "embed [3]: wrong", id="a-failed-check"),
        pytest.param(CLEAN, "Killed", "the checks ended early (exit status 0): Killed", id="killed"),
        pytest.param("", said([]), "its log has no summary", id="no-summary"),
        pytest.param(
            "Warning: Error buffer overflow has been detected. Some records have been dropped\n" + CLEAN,
            said([]),
            "it dropped reports",
            id="dropped-reports",
        ),
    ],
)
def test_what_goes_wrong_is_said(tool, log, printed, problem):
    names, found, problems = sanitize.run(["memcheck"], tool(log, printed))
    assert problems == ([f"memcheck: {problem}"] if problem else [])
    assert names == ([] if printed == "Killed" else ["embed", "norm_project"])
    assert ("memcheck" in found) == (printed == said([]) and log in (CLEAN, BAD))
