"""mlx_lm's own tests of generation, prompt cache, samplers and server pass on an accelerated model."""

from __future__ import annotations

import importlib.util
import subprocess
import tarfile
from importlib.metadata import version

import pytest

from tools import mlx_lm_tests
from tools.mlx_lm_tests import NotAvailableError, fetch, main


@pytest.mark.slow
def test_mlx_lms_tests_pass_but_for_the_listed_ones(tmp_path):
    if importlib.util.find_spec("requests") is None:
        pytest.skip("mlx_lm's tests of its server need the package requests")
    try:
        tests = fetch(tmp_path)
    except NotAvailableError as error:
        pytest.skip(str(error))
    assert mlx_lm_tests.run(tests) == 0


def archive(directory, files):
    name = f"mlx_lm-{version('mlx-lm')}"
    (directory / name / "tests").mkdir(parents=True)
    for file, text in files.items():
        (directory / name / "tests" / file).write_text(text)
    with tarfile.open(directory / f"{name}.tar.gz", "w:gz") as made:
        made.add(directory / name, name)


def test_files_of_a_source_distribution(tmp_path):
    archive(tmp_path, dict.fromkeys(mlx_lm_tests.FILES, ""))
    assert sorted(path.name for path in fetch(tmp_path).iterdir()) == sorted(mlx_lm_tests.FILES)


def test_a_source_distribution_without_tests(tmp_path):
    archive(tmp_path, {"test_generate.py": ""})
    with pytest.raises(NotAvailableError, match=r"does not hold test_generate\.py, test_prompt_cache\.py"):
        fetch(tmp_path)


def test_no_network(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(mlx_lm_tests.subprocess, "run", lambda *_, **__: failed)
    assert main([]) == 3
    assert "pip cannot fetch the source distribution of mlx-lm: ERROR: No matching" in capsys.readouterr().err


def run_file(tmp_path, body):
    tests = tmp_path / "tests"
    tests.mkdir()
    for file in mlx_lm_tests.FILES:
        (tests / file).write_text("")
    (tests / "test_generate.py").write_text(body)
    return main([str(tests)])


def test_a_model_of_the_hub_is_the_accelerated_checkpoint(tmp_path):
    body = """
import mlx.core as mx
from mlx_lm.utils import load

def test_it():
    model, tokenizer = load("mlx-community/Qwen1.5-0.5B-Chat-4bit")
    model.set_dtype(mx.float32)
    assert type(model).__name__.startswith("Accelerated")
    assert tokenizer.encode("hello")
"""
    assert run_file(tmp_path, body) == 0


@pytest.mark.parametrize("passes", [True, False])
def test_a_listed_test_must_fail(tmp_path, passes):
    body = f"class TestGenerate:\n    def test_many_batches(self):\n        assert {passes}\n"
    assert run_file(tmp_path, body) == (1 if passes else 0)
