"""`python -m lily_mlx.metal.check`: compiles every kernel text for Apple devices with a C++ front end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from .check import Result, check_texts
from .frontend import FrontEndMissingError
from .texts import collect


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of all kernels; returns 1 if one does not pass, 2 if the check cannot run."""
    parser = argparse.ArgumentParser(prog="python -m lily_mlx.metal.check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the encodings of the usual checkpoints")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only kernels of this name (repeatable)")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    texts = collect(options.quick)
    if options.kernel:
        unknown = set(options.kernel) - {text.name for text in texts}
        if unknown:
            parser.error(f"no kernel named {', '.join(sorted(unknown))}; there are {_names(texts)}")
        texts = [text for text in texts if text.name in options.kernel]
    try:
        results = list(check_texts(texts))
    except FrontEndMissingError as error:
        print(error, file=sys.stderr)
        return 2
    report(results)
    failed = sum(not result.passed for result in results)
    print(
        f"{len(texts)} texts, {len(results)} functions, {failed} with errors; {time.monotonic() - start:.0f} s; "
        "not a run on Apple's compiler"
    )
    return 1 if failed else 0


def report(results: Sequence[Result]) -> None:
    """One line for each kernel function, then all findings."""
    width = max((len(result.unit.name) for result in results), default=0)
    print(f"{'kernel':{width}}  instantiations  result")
    for result in results:
        verdict = "passed" if result.passed else f"{len(result.findings)} errors"
        print(f"{result.unit.name:{width}}  {max(1, len(result.unit.instantiations)):14}  {verdict}")
    for result in results:
        for finding in result.findings:
            print(f"{finding}")


def _names(texts: Sequence[object]) -> str:
    return ", ".join(sorted({str(getattr(text, "name", "")) for text in texts}))


if __name__ == "__main__":
    sys.exit(main())
