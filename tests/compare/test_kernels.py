"""`compare.kernels` in its short form on the `cpu` backend: every case, what it refuses, what it records."""

from __future__ import annotations

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest

from compare import graph, kernel_cases, kernels, launches, results, timing
from compare.kernel_cases import linear as linear_cases
from compare.kernel_cases import sampling as sampling_cases
from compare.kernel_cases.case import relative_error, sample
from compare.kernel_cases.operations import DeviceOperations
from compare.kernel_cases.reading import LaunchShape, Reading, read, recorded_launches
from compare.kernel_cases.source import Source
from compare.results import GateError
from lily_mlx import metal
from lily_mlx.kernels.linear import rms_norm

FAMILIES = ("linear", "deltanet", "attention", "moe", "sampling")
SHORT = ["--small", "--rounds", "1", "--drift", "1000"]
CEILINGS = {"copy_bytes_per_s": 1e9, "matrix_flops_per_s": 1e9, "matrix_size": 1, "launch_s": 1e-6}
FIELDS = (
    "name", "family", "phase", "shape", "calls_per_step", "seconds", "bytes", "bytes_per_s", "share_of_copy", "flops",
    "flops_per_s", "share_of_matrix", "error", "mlx_ops_seconds", "mlx_ops_error", "mlx_metal_seconds",
    "mlx_metal_error", "read_only_seconds", "spread",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where results go; the ceilings of the device are not measured."""
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    monkeypatch.setattr(kernels, "ceilings", lambda options: CEILINGS)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_in_its_small_form(family, folder, capsys):
    kernels.main([*SHORT, "--cases", f"{family}.*"])
    (result,) = results.read_all(folder)
    expected = [case for case in kernel_cases.all_cases(small=True) if case.family == family]
    assert result["kind"] == "kernels"
    assert result["gate"]["green"] is True
    assert result["ceilings"] == CEILINGS
    assert [row["name"] for row in result["rows"]] == [case.name for case in expected]
    for row in result["rows"]:
        assert set(FIELDS) <= set(row)
        assert row["seconds"] > 0
        assert row["mlx_ops_seconds"] > 0, row["mlx_ops_message"]
        # Metal chains may lack a kernel, and then say so.
        assert (row["mlx_metal_seconds"] or 0) > 0 or row["mlx_metal_message"].startswith("UnavailableError: ")
        assert row["error"] <= max(row["error_limit"], 0)
        is_matvec = row["phase"] == "decode" and row["name"].split(".")[1] in (
            "norm_project", "project_add", "gated_norm_project_add", "head", "experts_gate_up", "experts_down",
        )  # fmt: skip
        assert (row["read_only_seconds"] is not None) == is_matvec
    assert expected[0].name in capsys.readouterr().out


def test_json_and_ceilings(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    kernels.main([*SHORT, "--cases", "linear.rms_norm.9", "--phase", "prefill", "--json", "--no-write"])
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == ["linear.rms_norm.9"]
    assert all(value > 0 for value in result["ceilings"].values())
    assert list(tmp_path.iterdir()) == []


def test_list_prints_names_and_measures_nothing(folder, capsys):
    kernels.main(["--list", "--phase", "decode", "--cases", "moe.*"])
    assert capsys.readouterr().out.split() == ["moe.experts_gate_up", "moe.experts_down"]


def test_an_unknown_case_is_refused(folder):
    with pytest.raises(SystemExit, match=r"no case matches 'nothing\*'"):
        kernels.main([*SHORT, "--cases", "nothing*"])


def test_a_wrong_kernel_is_refused(folder, monkeypatch):
    monkeypatch.setattr(linear_cases, "rms_norm", lambda x, w, eps: 1.05 * rms_norm(x, w, eps))
    with pytest.raises(GateError, match=r"linear\.rms_norm\.9: out = 0\.0"):
        kernels.main([*SHORT, "--cases", "linear.rms_norm.*"])
    assert list(folder.iterdir()) == []


def test_a_kernel_that_fails_is_refused(folder, monkeypatch):
    def broken(*arguments):
        raise ValueError("no such tile")

    monkeypatch.setattr(linear_cases, "rms_norm", broken)
    with pytest.raises(GateError, match=r"linear\.rms_norm\.9 failed: ValueError: no such tile"):
        kernels.main([*SHORT, "--cases", "linear.rms_norm.9"])
    assert list(folder.iterdir()) == []


def growing_clock():
    """Time that runs faster and faster."""
    ticks = itertools.count(1)
    return lambda: 1.5 ** next(ticks)


def test_a_drifting_timer_is_refused(folder, monkeypatch):
    monkeypatch.setattr(timing, "clock", growing_clock())
    with pytest.raises(GateError, match=r"the rounds of ours differ by"):
        kernels.main(["--small", "--rounds", "4", "--drift", "0.1", "--cases", "linear.rms_norm.9"])
    assert list(folder.iterdir()) == []


def test_a_drifting_ceiling_is_refused(monkeypatch):
    monkeypatch.setattr(timing, "clock", growing_clock())
    with pytest.raises(GateError, match="the rounds of copy differ by"):
        timing.copy_bandwidth(1 << 16, rounds=4, drift=0.1)


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        (lambda self, x, w, eps: mx.fast.rms_norm(x, w, eps) * 2, "ValueError: not timed: its error of out, 1,"),
        (lambda self, x, w, eps: mx.zeros(3) + mx.zeros(4), "broadcast"),
    ],
    ids=["wrong", "failing"],
)
def test_a_bad_baseline_is_recorded_and_not_timed(replacement, words, folder, monkeypatch, capsys):
    monkeypatch.setattr(DeviceOperations, "rms_norm", replacement)
    kernels.main([*SHORT, "--cases", "linear.rms_norm.9"])
    (result,) = results.read_all(folder)
    (row,) = result["rows"]
    assert row["seconds"] > 0
    assert row["mlx_ops_seconds"] is None
    assert words in row["mlx_ops_message"]
    assert words in capsys.readouterr().out


def test_the_cases_of_a_decode_step_are_the_step(monkeypatch):
    """Their bytes are the least bytes of a step, their calls its launches (attention is two)."""
    monkeypatch.setattr(sampling_cases.Select, "parts", 1024)  # found by a launch of full size otherwise
    context = 4096
    step = [
        case
        for case in kernel_cases.all_cases()
        if case.phase == "decode" and case.shape.get("context", context) == context
    ]
    moved = sum(case.calls_per_step * case.bytes for case in step)
    least = sum(launches.minimum_bytes(context).values())
    assert least <= moved < 1.02 * least
    assert sum(case.calls_per_step for case in step) + 10 == 253


def test_names_of_cases_are_unique():
    for small in (False, True):
        names = [case.name for case in kernel_cases.all_cases(small)]
        assert len(names) == len(set(names))


def whole_step() -> tuple[list[kernel_cases.Case], list[dict[str, object]]]:
    cases = [case for case in kernel_cases.all_cases(small=True) if case.phase == "decode"]
    rows = [
        {
            "name": case.name,
            "calls_per_step": case.calls_per_step,
            "seconds": 1.0,
            "mlx_ops_seconds": 3.0,
            "mlx_metal_seconds": 2.0,
        }
        for case in cases
    ]
    return cases, rows


def test_sums_over_a_step():
    cases, rows = whole_step()
    calls = sum(case.calls_per_step for case in cases if case.shape.get("context", 300) == 300)
    rows[0]["mlx_metal_seconds"] = None
    first, second = kernels.summarise(rows, cases)
    assert (first["phase"], first["rows"], first["context"], second["context"]) == ("decode", 1, 256, 300)
    assert first["seconds"] == calls
    assert first["ratio_to_mlx_ops"] == 3
    assert first["mlx_metal_seconds"] == 2 * calls + cases[0].calls_per_step
    assert first["substituted"] == [cases[0].name]
    rows[0]["mlx_ops_seconds"] = None
    assert kernels.summarise(rows, cases)[0]["ratio_to_mlx_metal"] is None


def test_a_part_of_a_step_has_no_sum():
    cases, rows = whole_step()
    assert kernels.summarise(rows[1:], cases) == []


def test_arms_alternate_and_slow_ones_get_fewer_rounds(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing, "clock", lambda: now[0])

    def arm(name: str, seconds: float) -> timing.Arm:
        def call(links):
            order.append(name)
            now[0] += seconds
            return links, []

        return timing.Arm(name, [call, call])

    found = timing.measure([arm("a", 0.01), arm("b", 0.5)], rounds=4, drift=0.1)
    assert "".join(order[::2]) == "abbaaa"
    assert found["a"].seconds == pytest.approx(0.01)
    assert found["b"].rounds == pytest.approx((0.5, 0.5))


def test_calls_hand_on_their_links():
    def call(links):
        return {"x": links["x"] + 1}, [links["x"]]

    links, kept = timing.Arm("sum", [call] * 3, {"x": mx.array(5)})._one_pass({"x": mx.array(5)})
    assert links["x"].item() == 8
    assert [x.item() for x in kept] == [5, 6, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_linked_calls_run_one_after_another_without_other_launches(family):
    for case in kernel_cases.all_cases(small=True):
        if case.family != family:
            continue
        errors, arm = kernels.CaseRun(case, seed=0).errors(kernel_cases.OURS)
        assert all(found.passed for found in errors), case.name
        names = list(arm.links)

        def run(*arrays, names=names, arm=arm):
            links, kept = arm._one_pass(dict(zip(names, arrays, strict=False)))
            return [*links.values(), *kept]

        with metal.use_backend("metal", tracing=True):
            found = graph.trace(run, list(arm.links.values()) or [mx.zeros(1)])
        assert all(launch.is_kernel for launch in found.launches), case.name
        if names:
            assert found.stages() == len(found.launches) >= len(arm.calls), case.name


@pytest.mark.checked
@pytest.mark.parametrize(
    ("stack", "matrices", "launch"),
    [
        ((), [0], LaunchShape(3, 4)),
        ((), [0], LaunchShape(1, 1)),
        ((5,), [4, 0, 2, 2], LaunchShape(8, 2)),
        ((5,), [1, 3, 4], LaunchShape(4, 1)),
    ],
    ids=["matrix", "one simdgroup", "stack, a share each", "stack, all in each"],
)
def test_the_reading_kernel_reads_every_byte_once(stack, matrices, launch):
    w = Source(3, "reading").weight(*stack, 24, 128)
    out = read(Reading(w, mx.array(matrices, mx.uint32)), launch, mx.zeros(8, mx.uint32))
    pieces = [
        np.array(array.view(mx.uint32)).reshape(-1 if not stack else stack[0], array.nbytes // 4 // (stack or (1,))[0])
        for array in (w.weight, w.scales, w.biases)
    ]
    want = 0
    for matrix in matrices:
        for array in pieces:
            words = array[matrix].reshape(-1, 4)
            want += int(np.bitwise_xor.reduce(words, axis=1).astype(np.uint64).sum())
    assert int(np.array(out).astype(np.uint64).sum()) % 2**32 == want % 2**32


def test_launches_are_recorded():
    with recorded_launches() as found:
        rms_norm(mx.ones((40, 64), mx.bfloat16), mx.ones(64, mx.bfloat16), 1e-6)
    assert len(found) == 1
    assert found[0].threadgroups * found[0].simdgroups >= 40


def test_random_weights_have_the_deviation_they_promise():
    w = Source(1, "weights").weight(256, 512, gain=2.0)
    dense = np.array(
        mx.dequantize(w.weight, *(x.astype(mx.float32) for x in (w.scales, w.biases)), group_size=64, bits=4)
    )
    assert dense.std() == pytest.approx(2.0 / 512**0.5, rel=0.02)
    assert abs(dense.mean()) < 0.02 * dense.std()


def test_router_logits_are_exact_in_bfloat16_and_distinct():
    logits = Source(2, "logits").logits(5, 256)[:, :-1]
    assert mx.array_equal(logits.astype(mx.bfloat16).astype(mx.float32), logits).item()
    assert all(len(set(row)) == 256 for row in np.array(logits).tolist())


def test_errors_of_missing_numbers_are_infinite():
    want = np.array([1.0, 2.0])
    assert relative_error(np.array([1.0, 2.2]), want) == pytest.approx(0.1)
    assert relative_error(np.array([1.0, np.nan]), want) == float("inf")
    assert relative_error(np.array([1.0]), want) == float("inf")


def test_samples_keep_both_ends():
    assert sample(3, 8) == [0, 1, 2]
    assert sample(1000, 4) == [0, 333, 666, 999]
