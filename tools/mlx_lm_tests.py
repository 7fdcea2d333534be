"""`python -m tools.mlx_lm_tests`: runs mlx_lm's own tests of generation, caches, samplers and server on the kernels.

The test files come from mlx_lm's source distribution of the installed version, which pip fetches from the package
index, or from a directory. Nothing in them is changed. Where they load a model from the hub they get the bundled
checkpoint, accelerated: that is all that `tools.mlx_lm_tests_plugin` does, besides marking the tests that cannot pass
as expected failures, each with its reason. An expected failure that passes is an error. With --plain the checkpoint is
not accelerated, and nothing is expected to fail. The server's tests need the package `requests`.

    python -m tools.mlx_lm_tests                       # fetches the source distribution
    python -m tools.mlx_lm_tests ~/mlx-lm/tests -k cache
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lily_mlx.checkpoints import bundled_checkpoint

PLAIN = "LILY_MLX_TESTS_PLAIN"
ROOT = Path(__file__).resolve().parents[1]
FILES = ("test_generate.py", "test_prompt_cache.py", "test_sample_utils.py", "test_server.py")


class NotAvailableError(Exception):
    """The source distribution cannot be fetched."""


def fetch(directory: Path) -> Path:
    """The tests of the installed version of mlx_lm.

    Args:
        directory: where the source distribution is kept.

    Raises:
        NotAvailableError: pip finds no source distribution, or it holds no tests.
    """
    name = f"mlx_lm-{version('mlx-lm')}"
    archive = directory / f"{name}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mlx-lm"]
        command += ["--dest", str(directory), f"mlx-lm=={version('mlx-lm')}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not archive.exists():
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise NotAvailableError(f"pip cannot fetch the source distribution of mlx-lm: {lines[-1]}")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    tests = directory / name / "tests"
    if not all((tests / file).exists() for file in FILES):
        raise NotAvailableError(f"{archive.name} does not hold {', '.join(FILES)}")
    return tests


def run(tests: Path, options: Sequence[str] = (), plain: bool = False) -> int:
    """Runs the files under pytest; returns its exit status.

    Args:
        tests: directory of the files.
        options: for pytest.
        plain: the same model on mlx_lm's own path, to see what fails there.
    """
    command = [sys.executable, "-m", "pytest", "-p", "tools.mlx_lm_tests_plugin", "-c", "/dev/null"]
    command += ["--rootdir", str(tests), "-q", "-rxXs", "-n", "0", *options, *(str(tests / file) for file in FILES)]
    with tempfile.TemporaryDirectory() as hub:
        _fill(Path(hub))
        changes = {"HF_HUB_CACHE": hub, "HF_HUB_OFFLINE": "1", PLAIN: "1" if plain else ""}
        return subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **changes}).returncode


def _fill(hub: Path) -> None:
    """Makes a cache of the hub that holds the bundled checkpoint, since a test asks for a list of such models."""
    revision = "0" * 40
    model = hub / "models--lily-mlx--tiny"
    for directory in ("refs", "blobs", f"snapshots/{revision}"):
        (model / directory).mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    for file in bundled_checkpoint().iterdir():
        (model / "snapshots" / revision / file.name).symlink_to(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns pytest's exit status, or 3 if there are no tests to run."""
    parser = argparse.ArgumentParser(prog="python -m tools.mlx_lm_tests", description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, help="directory of mlx_lm's tests; default: fetched by pip")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, see pytest")
    parser.add_argument("--plain", action="store_true", help="the same model without the kernels")
    options = parser.parse_args(arguments)
    chosen = ["-k", options.k] if options.k else []
    if options.path is not None:
        return run(options.path.resolve(), chosen, options.plain)
    with tempfile.TemporaryDirectory() as directory:
        try:
            tests = fetch(Path(directory))
        except NotAvailableError as error:
            print(error, file=sys.stderr)
            return 3
        return run(tests, chosen, options.plain)


if __name__ == "__main__":
    sys.exit(main())
