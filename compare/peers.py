"""`python -m compare.peers FILE`: a peer's own benchmark, measured elsewhere, as a result of kind "peer".

Reports show such rows beside ours and mark them: the harness neither ran the peer nor compared its output.

The file is one JSON object:
    kind: "peer".
    engine: name and version, separated by the first space.
    date, device, model, command: what was measured, where and how.
    prefill_tokens_per_s: {prompt length: tokens per second}.
    decode_tokens_per_s_at_depth: {cached tokens: tokens per second}.
    prefill_<n>_at_depth_<m>_tokens_per_s: a prompt of n tokens after m cached ones (optional, any number).
    note: about repetitions and spread (optional).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import results

TEXTS = ("engine", "date", "device", "model", "command")
SPEEDS = {"prefill_tokens_per_s": "prefill", "decode_tokens_per_s_at_depth": "decode"}
AT_DEPTH = re.compile(r"prefill_(\d+)_at_depth_(\d+)_tokens_per_s")
SOURCE = "measured separately with the peer's own benchmark; this harness did not run it or check its output"


def _row(phase: str, length: int, engine: str, speed: Any, context: int = 0) -> dict[str, Any]:
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not math.isfinite(speed) or speed <= 0:
        raise ValueError(f"{phase} at {length}: {speed!r} is no speed; give tokens per second")
    row = {"phase": phase, "length": length, "engine": engine, "tokens_per_s": float(speed)}
    return {**row, "context": context} if context else row


def convert(peer: Mapping[str, Any]) -> dict[str, Any]:
    """A peer's file in the schema of `compare/results`.

    Raises:
        ValueError: a field is missing, unknown or not of its type.
    """
    if peer.get("kind") != "peer":
        raise ValueError(f"kind is {peer.get('kind')!r}, not 'peer'")
    for name in TEXTS:
        if not isinstance(peer.get(name), str) or not peer[name]:
            raise ValueError(f"the field {name!r} is missing or no text")
    engine, _, version = peer["engine"].partition(" ")
    rows = []
    for name, value in peer.items():
        depth = AT_DEPTH.fullmatch(name)
        if name in SPEEDS:
            rows += [_row(SPEEDS[name], int(length), engine, speed) for length, speed in value.items()]
        elif depth:
            rows.append(_row("prefill", int(depth[1]), engine, value, context=int(depth[2])))
        elif name not in (*TEXTS, "kind", "note"):
            known = ", ".join((*TEXTS, *SPEEDS, "note"))
            raise ValueError(f"the field {name!r} is unknown; known are {known}")
    if not rows:
        raise ValueError(f"it holds no speeds; give {' or '.join(SPEEDS)}")
    found = re.search(r"commit (\w+)", version)
    return {
        "kind": "peer",
        "date": peer["date"],
        "commit": f"{found[1]} of {engine}" if found else "unknown",
        "command": peer["command"],
        "device": peer["device"],
        "os": "not recorded",
        "versions": {engine: version or "not recorded"},
        "seed": None,
        "gate": results.Gate().as_dict(),
        "source": SOURCE,
        # The shapes are those of the sweep's synthetic model; the weights and their format are the peer's own.
        "settings": {"model": "synthetic"},
        "peer_model": peer["model"],
        "note": peer.get("note", ""),
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="compare.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the peer's figures, as JSON")
    directory = Path(os.environ.get("LILY_MLX_RESULTS", results.RESULTS))
    parser.add_argument("--results", type=Path, default=directory, help="where to write (%(default)s)")
    options = parser.parse_args(argv)
    try:
        result = convert(json.loads(options.file.read_text()))
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{options.file} is no peer's result: {error}") from error
    (engine,) = result["versions"]
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{result['date'][:10]}-peer-{re.sub(r'[^a-z0-9]+', '_', engine.lower())}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    lines = [[row["phase"], row["length"], row.get("context", 0), row["tokens_per_s"]] for row in result["rows"]]
    print(results.table(["phase", "length", "after", f"{engine}, tokens/s"], lines))
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
