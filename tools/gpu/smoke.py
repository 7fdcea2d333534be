"""Says in one line per case what a GPU does with the language that our kernels use.

    python tools/gpu/smoke.py [--backend cuda] [words that a case's name holds]

It ends with what a launch costs, as called and inside mx.compile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lily_mlx import metal
from tests.metal.language_cases import Case, cases


def run_case(case: Case) -> bool:
    start = time.perf_counter()
    try:
        outputs = case.run()
        mx.eval(outputs)
        wrong = case.check(outputs)
    except Exception:
        wrong = traceback.format_exc().strip().splitlines()[-12:]
    seconds = time.perf_counter() - start
    print(f"{'FAIL' if wrong else 'PASS'} {case.name} ({seconds:.2f} s)", flush=True)
    for line in wrong:
        print(f"     {line}")
    return not wrong


@contextlib.contextmanager
def captured_stdout(into: list[str]):
    """What C++ code writes to standard output inside the block."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            into.append(file.read().decode())


def check_text(case: Case) -> bool:
    """Whether MLX compiles the text that metal.cuda.module expects, and so finds our machine code."""
    from lily_mlx.metal import cuda_backend
    from lily_mlx.metal.cuda import module

    launch = case.launch()
    source = cuda_backend.generate(launch, module.device_architecture())
    kernel = mx.fast.cuda_kernel(
        name=source.name, input_names=list(source.inputs), output_names=list(source.outputs),
        source=source.source, header=source.header,
    )  # fmt: skip
    printed: list[str] = []
    with captured_stdout(printed):
        kernel(
            inputs=list(launch.inputs), grid=launch.grid, threadgroup=launch.threadgroup,
            output_shapes=launch.output_shapes, output_dtypes=launch.output_dtypes, verbose=True,
        )  # fmt: skip
    expected = module.mlx_text(source, launch.inputs, launch.output_dtypes)
    same = expected in printed[0]
    print(f"{'PASS' if same else 'FAIL'} MLX's text is the expected one")
    if not same:
        print(f"expected:\n{expected}\nMLX's:\n{printed[0]}")
    return same


def launch_cost(count: int = 320) -> None:
    """Microseconds per launch in a chain, as called and compiled."""
    kernel = metal.Kernel.from_source(
        "chain", ("x",), ("out",), "uint i = thread_position_in_grid.x; out[i] = x[i] + 1.0f;"
    )

    def chain(x: mx.array) -> mx.array:
        for _ in range(count):
            (x,) = kernel(
                [x],
                grid=(128, 1, 1),
                threadgroup=(128, 1, 1),
                output_shapes=[(128,)],
                output_dtypes=[mx.float32],
            )
        return x

    for label, function in (("as called", chain), ("compiled", mx.compile(chain))):
        x = mx.zeros((128,))
        times = []
        for _ in range(8):
            start = time.perf_counter()
            x = function(x)
            built = time.perf_counter()
            mx.eval(x)
            times.append((time.perf_counter() - start, built - start))
        total, python = min(times)
        print(f"launch {label}: {total / count * 1e6:.1f} us, of which Python {python / count * 1e6:.1f} us")
    value = float(x[0])
    print(f"{'PASS' if value == 8 * count else 'FAIL'} chain counts {value:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    with metal.use_backend(options.backend):
        chosen = [case for case in cases() if not options.words or any(w in case.name for w in options.words)]
        passed = [run_case(case) for case in chosen]
        if options.backend == "cuda":
            passed.append(check_text(chosen[0]))
        if not options.words and options.backend != "cpu":
            launch_cost()
    print(f"{sum(passed)} of {len(passed)} pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
