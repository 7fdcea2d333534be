"""`python -m compare.ablations`: every mechanism of the article switched off, one at a time.

For each mechanism and length the engine as it is and the engine without the mechanism run on the same weights in one
process, in alternating order (A B B A). Before anything is timed their logits are compared: a form that differs by
more than rounding gets no speed. Decode starts from a synthetic context; prefill is timed to the first token on the
host. An effect is the speed with the mechanism over the speed without it, minus one. Where the alternative brings
kernels of its own, a control runs them with the mechanism on: the effect of the control is free of all else in which
they differ from the engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lily_mlx.engine import DEFAULT_CHUNK_SIZE

from .. import results
from ..arms import load_lily
from ..progress import progress
from ..sweep import DEFAULT_DRIFT
from .pair import Row, Run
from .registry import Mechanism, named


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare.ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mechanisms", nargs="+", metavar="NAME", help="only these; --list names them")
    parser.add_argument("--model", default="synthetic", help="'synthetic', 'tiny' or a checkpoint directory")
    parser.add_argument("--layers", type=int, help="fewer layers of the synthetic model")
    parser.add_argument("--lengths", type=int, nargs="+", help="instead of the article's lengths")
    parser.add_argument("--rounds", type=int, default=4, help="timings of each form")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a round")
    parser.add_argument("--chunk-size", type=int, default=DEFAULT_CHUNK_SIZE, help="of the engine's prompt chunks")
    parser.add_argument(
        "--drift", type=float, default=DEFAULT_DRIFT, help="largest spread between the rounds of a form"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    parser.add_argument("--list", action="store_true", help="list the mechanisms and stop")
    return parser.parse_args(argv)


def listing(mechanisms: Sequence[Mechanism]) -> str:
    lines = [[m.name, m.phase, " ".join(f"{n:,}" for n in m.article or ()), m.replaced_by] for m in mechanisms]
    return results.table(["mechanism", "phase", "lengths", "replaced by"], lines)


def as_table(rows: Sequence[Row]) -> str:
    """The rows as the article shows them, with the memory where the mechanism is about memory."""

    def percent(value: float | None) -> str | None:
        return None if value is None else f"{value:+.1%}"

    def gigabytes(row: Row, key: str) -> float | None:
        return row[key] / 1e9 if key in row else None

    headings = ["mechanism", "phase", "length", "with", "without", "effect", "of control", "article", "spread"]
    return results.table(
        [*headings, "GB with", "GB without"],
        [
            [
                row["mechanism"],
                row["phase"],
                row["length"],
                row["with"],
                row["without"],
                percent(row["effect"]),
                percent(row.get("effect_of_control")),
                percent(row["article_effect"]),
                f"{row['spread']:.1%}",
                gigabytes(row, "peak_memory_bytes"),
                gigabytes(row, "peak_memory_bytes_without"),
            ]
            for row in rows
        ],
    )


def measure(run: Run, mechanisms: Sequence[Mechanism], lengths: Sequence[int] | None) -> tuple[list[Row], list[str]]:
    """Measures every mechanism; returns the rows, and the reason for each one that was refused a speed."""
    jobs = [(m, length) for m in mechanisms for length in lengths or m.article or ()]
    rows: list[Row] = []
    refused: list[str] = []
    for mechanism, length in progress(jobs, "ablations"):
        before, run.gate = run.gate, results.Gate()
        try:
            rows += mechanism.rows(run, length)
        except results.GateError as error:
            refused.append(f"{mechanism.name} at {length}: {error}")
            run.gate = before
        else:
            before.extend(run.gate.as_dict())
            run.gate = before
        mx.clear_cache()
    return rows, refused


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    mechanisms = named(options.mechanisms)
    if options.list:
        print(listing(mechanisms))
        return
    model = load_lily(options.model, options.seed, options.layers)
    run = Run(model, options.seed, options.rounds, options.steps, options.drift, options.chunk_size)
    run.measure_noise()
    rows, refused = measure(run, mechanisms, options.lengths)
    print(json.dumps(rows) if options.json else as_table(rows))
    if rows and not options.no_write:
        settings: dict[str, Any] = {k: v for k, v in vars(options).items() if k not in ("no_write", "json", "list")}
        path = results.write(
            "ablations",
            rows,
            seed=options.seed,
            gate=run.gate,
            name=options.model,
            settings=settings,
            tolerance=run.tolerance,
            refused=refused,
        )
        print(f"wrote {path}", file=sys.stderr)
    if refused:
        raise results.GateError("\n".join(refused))


if __name__ == "__main__":
    main()
