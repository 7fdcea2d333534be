"""Result files, checked, and merged so that for each measured thing the newest green result wins."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..results import KINDS, TIMED_KINDS

Row = Mapping[str, Any]
PHASES = ("prefill", "decode")
OWN_ENGINE = "lily_mlx"
ACCELERATED = "mlx_lm+lily_mlx"  # mlx-lm's own loop on our kernels: our loop's rival, and no other engine
# Where an engine stands in tables and legends; peers, which are not listed, follow.
ENGINE_ORDER = (OWN_ENGINE, ACCELERATED, "mlx_lm", "mlx_lm+metal")
REQUIRED = ("kind", "date", "commit", "command", "device", "os", "versions", "gate", "rows")
ROW_FIELDS = {
    "sweep": ("phase", "length", "engine", "tokens_per_s"),
    "peer": ("phase", "length", "engine", "tokens_per_s"),
    "launches": ("engine", "phase", "launches", "stages"),
    "kernels": ("name", "family", "seconds"),
    "consistency": ("engine", "baseline", "perplexity_ratio", "top1_agreement", "positions"),
    "ablations": ("mechanism", "effect"),
    "batch": ("phase", "streams", "length", "tokens_per_s"),
}


class ReportError(RuntimeError):
    """Files from which no report can be made; the message names the file and the remedy."""


class Model(NamedTuple):
    """What was run: 'synthetic', 'tiny' or a checkpoint's name, and its number of layers if that was reduced (else 0)."""

    name: str
    layers: int = 0

    @property
    def title(self) -> str:
        known = {
            "synthetic": "Qwen3.6-35B-A3B shapes, random 4-bit weights",
            "tiny": "the bundled tiny checkpoint",
            "small": "small shapes",
        }
        title = known.get(self.name, self.name)
        return f"{title}, {self.layers} layers" if self.layers else title

    @property
    def is_full_size(self) -> bool:
        """Whether the full-size model's bytes (`compare.launches`) are this one's."""
        name = self.name.lower()
        return not self.layers and (name == "synthetic" or ("35b-a3b" in name and "4bit" in name))


@dataclass(frozen=True)
class Result:
    """One result file."""

    path: Path
    data: Mapping[str, Any] = field(hash=False)

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def date(self) -> str:
        return str(self.data["date"])

    @property
    def device(self) -> str:
        return str(self.data["device"])

    @property
    def is_peer(self) -> bool:
        return self.kind == "peer"

    @property
    def rows(self) -> Sequence[Row]:
        rows: Sequence[Row] = self.data["rows"]
        return rows

    @property
    def settings(self) -> Mapping[str, Any]:
        """Options of the run: as recorded, else those of the command line that have a value."""
        recorded: Mapping[str, Any] | None = self.data.get("settings")
        if recorded is not None:
            return recorded
        words = shlex.split(str(self.data["command"]))
        pairs = itertools.pairwise(words)
        return {name[2:].replace("-", "_"): value for name, value in pairs if name.startswith("--")}

    def model(self, row: Row, default: str = "synthetic") -> Model:
        """The model of a row."""
        if self.settings.get("small"):
            return Model("small")
        name = str(row.get("model") or self.settings.get("model") or default)
        layers = self.settings.get("layers")
        return Model(Path(name).name, int(layers) if layers else 0)

    @property
    def gate_problem(self) -> str | None:
        """Why the gate is not green; None if it is."""
        gate = self.data["gate"]
        checks = gate.get("checks", [])
        if not checks:
            return "nothing was checked"
        failed = [str(check.get("name")) for check in checks if check.get("passed") is not True]
        if failed:
            return "failed: " + "; ".join(failed)
        return None if gate.get("green") is True else "it says so itself"


class Entry(NamedTuple):
    """A row and the file that it comes from."""

    row: Row
    result: Result


class Group(NamedTuple):
    """Speeds that may stand in one table."""

    device: str
    model: Model

    @property
    def title(self) -> str:
        return f"{self.device}: {self.model.title}"


class Point(NamedTuple):
    """A measurement's place: a prompt of `length` after `after` cached tokens, or a step after `length`."""

    phase: str
    length: int
    after: int = 0


Speeds = dict[Point, dict[str, Entry]]
_Choice = Callable[[Sequence[dict[str, Entry]]], dict[str, Entry]]  # of the entries of several files, oldest first


def read(directory: Path) -> list[Result]:
    """Every result of a directory, oldest first.

    Raises:
        ReportError: a file is not JSON, or lacks a field of the schema.
    """
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ReportError(f"{path} is not JSON ({error}); run its command again or remove it") from error
        _check(path, data)
        found.append(Result(path, data))
    return sorted(found, key=lambda result: (result.date, result.path.name))


def _check(path: Path, data: Any) -> None:
    missing = [name for name in REQUIRED if not isinstance(data, dict) or name not in data]
    if missing:
        raise ReportError(f"{path} is no result: it lacks {', '.join(missing)}; run its command again or remove it")
    if data["kind"] not in KINDS:
        raise ReportError(f"{path} has kind {data['kind']!r}, which is not one of {', '.join(KINDS)}")
    for index, row in enumerate(data["rows"]):
        missing = [name for name in ROW_FIELDS[data["kind"]] if name not in row]
        if missing:
            raise ReportError(f"{path}: row {index} lacks {', '.join(missing)}; a {data['kind']} row has these")
        speed = row.get("tokens_per_s", 1.0)
        if not (isinstance(speed, (int, float)) and math.isfinite(speed) and speed > 0):
            raise ReportError(f"{path}: row {index} has {speed!r} tokens/s; run its command again or remove it")
        if data["kind"] == "ablations":
            _check_effect(path, index, row)


def _check_effect(path: Path, index: int, row: Row) -> None:
    """An effect is a fraction (0.05: 5 % faster), so it must be near what `with` and `without` say."""
    effect, on, off = (row.get(name) for name in ("effect", "with", "without"))
    if not all(isinstance(value, (int, float)) for value in (effect, on, off)) or not (on and off):
        return
    near = min(abs(effect - ratio) for ratio in (on / off - 1, off / on - 1))  # type: ignore[operator]
    if not near <= 0.05 + 0.1 * abs(effect):  # type: ignore[arg-type]
        raise ReportError(
            f"{path}: row {index} has the effect {effect} with {on} and without {off}; an effect is a fraction of the "
            "speed, 0.05 for 5 % faster"
        )


@dataclass(frozen=True)
class Measurements:
    """Everything a report is made from.

    Attributes:
        results: accepted results, oldest first.
        refused: results whose speeds are not reported, each with the reason.
    """

    results: Sequence[Result]
    refused: Sequence[tuple[Result, str]]

    @classmethod
    def of(cls, results: Iterable[Result]) -> Measurements:
        accepted, refused = [], []
        for result in results:
            problem = result.gate_problem
            # Launches are counted and peers are measured elsewhere: both without checks, but never with failed ones.
            unchecked = result.kind in ("launches", "peer") and not result.data["gate"].get("checks")
            if problem and not unchecked and result.kind in (*TIMED_KINDS, "launches", "peer"):
                refused.append((result, problem))
            else:
                accepted.append(result)
        return cls(accepted, refused)

    def of_kind(self, *kinds: str) -> list[Result]:
        return [result for result in self.results if result.kind in kinds]

    def devices(self) -> dict[str, list[str]]:
        """Devices on which something ran, each with the backends that its rows name."""
        found: dict[str, set[str]] = {}
        for result in self.of_kind(*TIMED_KINDS, "consistency", "peer"):
            backends = {str(row["backend"]) for row in result.rows if "backend" in row}
            found.setdefault(result.device, set()).update(backends)
        return {device: sorted(backends) for device, backends in sorted(found.items())}

    def speeds(self) -> dict[Group, Speeds]:
        """Sweep rows, and beside them the peers' rows of the same device and shapes.

        The engines of a row were measured side by side: they are of the newest file that has ours and another, if our
        newest figure is of the same commit; else our newest figure stands alone, see `earlier_pairs`.
        """
        return self._speeds(lambda engine: engine != ACCELERATED)

    def earlier_pairs(self) -> dict[Group, Speeds]:
        """The newest sweep rows with our engine and another, where our newest figure is of another commit."""
        chosen = self.speeds()
        found = self._speeds(lambda engine: engine != ACCELERATED, _newest_pair)
        pairs = {
            group: {
                point: entries
                for point, entries in speeds.items()
                if entries and entries.keys() - chosen[group][point].keys()
            }
            for group, speeds in found.items()
        }
        return {group: speeds for group, speeds in pairs.items() if speeds}

    def loops(self) -> dict[Group, Speeds]:
        """Sweep rows where our loop and mlx-lm's loop on our kernels were measured side by side."""
        both = {OWN_ENGINE, ACCELERATED}
        found = {
            group: {point: entries for point, entries in speeds.items() if entries.keys() == both}
            for group, speeds in self._speeds(both.__contains__).items()
        }
        return {group: speeds for group, speeds in found.items() if speeds}

    def _speeds(self, wanted: Callable[[str], bool], choose: _Choice | None = None) -> dict[Group, Speeds]:
        found: dict[Group, dict[Point, list[dict[str, Entry]]]] = {}
        for result in self.of_kind("sweep", "peer"):
            own: set[tuple[Point, str]] = set()
            for row in result.rows:
                point = Point(row["phase"], row["length"], row.get("context", 0))
                if (point, row["engine"]) in own:
                    raise ReportError(f"{result.path} has {row['engine']} {point.phase} at {point.length} twice")
                own.add((point, row["engine"]))
                if not wanted(row["engine"]):
                    continue
                files = found.setdefault(Group(result.device, result.model(row)), {}).setdefault(point, [])
                if not files or next(iter(files[-1].values())).result is not result:
                    files.append({})
                files[-1][row["engine"]] = Entry(row, result)
        groups = {
            group: {point: (choose or _side_by_side)(files) for point, files in own.items()}
            for group, own in found.items()
        }
        own_groups = {
            g: s for g, s in groups.items() if any(not e.result.is_peer for p in s.values() for e in p.values())
        }
        return {group: dict(sorted(own_groups[group].items(), key=_point_order)) for group in sorted(own_groups)}

    def launches(self) -> dict[tuple[str, str, int], Entry]:
        """Rows by (phase, engine, context), the context from the file."""
        found: dict[tuple[str, str, int], Entry] = {}
        for result in self.of_kind("launches"):
            for row in result.rows:
                found[row["phase"], row["engine"], result.data.get("context", 0)] = Entry(row, result)
        return dict(sorted(found.items(), key=lambda item: (phase_rank(item[0][0]), item[0][2], _rank(item[0][1]))))

    def kernels(self) -> dict[Group, list[Entry]]:
        """Rows of each group, sorted by family, phase and name."""
        entries = self._newest("kernels", "rows", lambda r: (r.get("name"), r.get("phase"), str(r.get("shape"))))
        return {
            group: sorted(own, key=lambda e: (e.row["family"], phase_rank(e.row.get("phase", "")), e.row["name"]))
            for group, own in entries.items()
        }

    def kernel_sums(self) -> dict[Group, list[Entry]]:
        """Sums of kernels over a whole step or chunk."""
        return self._newest("kernels", "summary", lambda r: (r.get("phase"), r.get("rows"), r.get("context")))

    def ablations(self) -> dict[Group, list[Entry]]:
        """Rows of each group, in the order of the newest file, rows of older ones first."""
        return self._newest("ablations", "rows", lambda r: (r.get("mechanism"), r.get("phase"), r.get("length")))

    def batches(self) -> dict[Group, list[Entry]]:
        """Rows of each group: several streams at once, then the first token after a prefix.

        The rows of one context are of one file, since they are compared with each other: the newest of those that have
        the most rows of it.
        """
        found: dict[Group, dict[tuple[str, int], list[Entry]]] = {}
        for result in self.of_kind("batch"):
            own: dict[tuple[Group, tuple[str, int]], list[Entry]] = {}
            for row in result.rows:
                group = Group(result.device, result.model(row))
                own.setdefault((group, (row["phase"], row["length"])), []).append(Entry(row, result))
            for (group, place), entries in own.items():
                if len(entries) >= len(found.setdefault(group, {}).get(place, [])):
                    found[group][place] = sorted(entries, key=lambda entry: entry.row["streams"])
        return {
            group: [entry for place in sorted(places) for entry in places[place]]
            for group, places in sorted(found.items())
        }

    def consistency(self) -> list[Entry]:
        """Rows by model, engine, baseline and number of positions, whatever the gate says: they hold no speeds."""
        found: dict[tuple[Any, ...], Entry] = {}
        for result in self.of_kind("consistency"):
            for row in result.rows:
                key = (result.device, result.model(row, "tiny"), row["engine"], row["baseline"], row["positions"])
                found.pop(key, None)
                found[key] = Entry(row, result)
        return list(found.values())

    def _newest(self, kind: str, field_name: str, key: Callable[[Row], tuple[Any, ...]]) -> dict[Group, list[Entry]]:
        found: dict[Group, dict[Any, Entry]] = {}
        for result in self.of_kind(kind):
            seen: dict[Any, int] = {}
            for row in result.data.get(field_name, []):
                group = found.setdefault(Group(result.device, result.model(row)), {})
                # A file may hold the same kernel twice, in variants that the key does not tell apart.
                own = key(row)
                seen[own] = seen.get(own, 0) + 1
                group.pop((own, seen[own]), None)
                group[own, seen[own]] = Entry(row, result)
        return {group: list(entries.values()) for group, entries in sorted(found.items())}

    def rate(self, device: str, name: str) -> tuple[float, Result] | None:
        """The newest measured rate of a device: `copy_bytes_per_s` or `matrix_flops_per_s`."""
        for result in reversed(self.of_kind("kernels")):
            value = result.data.get(name) or result.data.get("ceilings", {}).get(name)
            if result.device == device and value and not result.settings.get("small"):
                return float(value), result
        return None

    def minimum_bytes(self) -> tuple[dict[str, float], int, Result] | None:
        """The fewest bytes of a decode step by part, the context they are for, and their source."""
        for result in reversed(self.of_kind("launches")):
            if result.data.get("minimum_bytes") and result.data.get("context"):
                return dict(result.data["minimum_bytes"]), int(result.data["context"]), result
        return None


def least_bytes_at(parts: Mapping[str, float], context: int, length: int) -> float:
    """The fewest bytes of a decode step after `length` tokens, from those after `context` tokens."""
    cached = parts["keys and values"]
    return sum(parts.values()) - cached + cached / context * length


def phase_rank(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase), "") if phase in PHASES else (len(PHASES), phase)


def _rank(engine: str) -> tuple[int, str]:
    return (ENGINE_ORDER.index(engine), "") if engine in ENGINE_ORDER else (len(ENGINE_ORDER), engine)


def engines(speeds: Speeds) -> list[str]:
    """Every engine of a group in the order of tables and legends."""
    return sorted({engine for entries in speeds.values() for engine in entries}, key=_rank)


def _side_by_side(files: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """The entries of one point from several files, oldest first."""
    measured = [entries for entries in files if not _source(entries).is_peer]
    own = [entries for entries in measured if OWN_ENGINE in entries]
    pairs = [entries for entries in own if len(entries) > 1]
    chosen = (own or measured or [{}])[-1]
    if pairs and _source(pairs[-1]).data["commit"] == _source(chosen).data["commit"]:
        chosen = pairs[-1]
    for entries in files:
        if _source(entries).is_peer:
            chosen = {**chosen, **entries}
    return chosen


def _newest_pair(files: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """The newest of one point's files that has our engine and another; nothing if there is none."""
    pairs = [entries for entries in files if OWN_ENGINE in entries and len(entries) > 1]
    return pairs[-1] if pairs else {}


def _source(entries: dict[str, Entry]) -> Result:
    return next(iter(entries.values())).result


def _point_order(item: tuple[Point, Any]) -> tuple[Any, ...]:
    point = item[0]
    return (phase_rank(point.phase), point.after, point.length)
