"""Products of few rows, whose weights stay in registers: every way to share the work out, against the reference."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from lily_mlx.kernels import linear, moe
from lily_mlx.kernels.linear import policy, reference
from lily_mlx.kernels.linear.policy import MatmulPlan, ShortPlan
from lily_mlx.kernels.moe import policy as moe_policy
from lily_mlx.kernels.moe import reference as moe_reference
from lily_mlx.metal import current_backend
from tests.kernels.moe.experts import Format, make_experts
from tests.kernels.moe.test_prefill import reference_routing
from tests.support import BFLOAT16_TOLERANCE, assert_close, bf16, quantized, rng, to_numpy

PLANS = [
    ShortPlan(rows=16, bands=1, across=1, slices=1, depth=128, ahead=1),
    ShortPlan(rows=16, bands=1, across=2, slices=2, depth=256, ahead=1),
    ShortPlan(rows=16, bands=1, across=4, slices=1, depth=512, ahead=4),
    ShortPlan(rows=16, bands=2, across=2, slices=2, depth=512, ahead=2),
    ShortPlan(rows=16, bands=2, across=1, slices=4, depth=512, ahead=1),
    ShortPlan(rows=16, bands=1, across=2, slices=2, depth=256, ahead=3),
    ShortPlan(rows=32, bands=1, across=4, slices=1, depth=128, ahead=1, x_ahead=True),
    ShortPlan(rows=64, bands=1, across=2, slices=1, depth=128, ahead=1, x_ahead=True),
]
each_plan = pytest.mark.parametrize(
    "plan",
    PLANS,
    ids=lambda p: f"{p.rows}-rows-{p.bands}-bands-{p.across}-across-{p.slices}-slices-{p.depth}-deep-{p.ahead}-ahead",
)
BOUNDARY = policy.DEVICES["cpu"].short.rows


def use_linear_plan(monkeypatch: pytest.MonkeyPatch, plan: ShortPlan) -> None:
    device = policy.device_policy()
    monkeypatch.setattr(policy, "device_policy", lambda: replace(device, short=plan, fill_short=1))


@each_plan
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(16, 33, 128), pytest.param(5, 64, 1280, marks=pytest.mark.slow), (1, 15, 96), (11, 17, 608)],
)
def test_matmul(plan: ShortPlan, rows: int, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage and several, columns that end inside one, rows and outputs that fill no tile."""
    use_linear_plan(monkeypatch, plan)
    assert isinstance(policy.matmul_plan(rows, outputs, columns), ShortPlan)
    generator = rng(rows + columns)
    weight, _ = quantized(generator, (outputs, columns), 4, 32)
    x, residual = (bf16(generator.standard_normal((rows, width))) for width in (columns, outputs))
    want = reference.matmul(to_numpy(x), weight, to_numpy(residual))
    assert_close("out", linear.matmul(x, weight, residual), want, 5e-3)


@each_plan
@pytest.mark.parametrize(
    ("intermediate", "hidden"),
    [
        (544, 96),
        pytest.param(32, 160, marks=pytest.mark.slow),
        pytest.param(128, 1280, marks=pytest.mark.slow),
    ],
)
def test_experts(plan: ShortPlan, intermediate: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(moe_policy.DEVICES[current_backend()], short_gate_up=(plan,), short_down=(plan,))
    monkeypatch.setitem(moe_policy.DEVICES, current_backend(), device)
    generator = rng(intermediate)
    weights, dense = make_experts(generator, 5, intermediate, hidden, Format((4, 32), (4, 32), (8, 32), (8, 32)))
    x = bf16(generator.normal(0.0, 1.0, (21, hidden)))
    logits = generator.normal(0.0, 2.0, (21, 6))
    logits[:, 2] += 4.0  # one expert has a full block and a part of another
    routing = moe.route(mx.array(logits.astype("float32")), 2, True, 16)
    same = reference_routing(routing)
    gate_up = moe.grouped_gate_up(x, routing, weights)
    want = moe_reference.grouped_gate_up(to_numpy(x), same, dense)
    assert_close("hidden", gate_up, want, BFLOAT16_TOLERANCE / 2)
    want = moe_reference.grouped_down(to_numpy(gate_up), same, dense)
    assert_close("outputs", moe.grouped_down(gate_up, routing, weights), want, BFLOAT16_TOLERANCE / 2)


@pytest.mark.parametrize("rows", [BOUNDARY, BOUNDARY + 1])
def test_both_sides_of_the_boundary_agree(rows: int) -> None:
    """A row has the same sums, up to the order of adding, from registers and from a tile of weights."""
    generator = rng(rows)
    weight, _ = quantized(generator, (70, 320), 4, 64)
    x = bf16(generator.standard_normal((BOUNDARY + 1, 320)))
    got, whole = (linear.matmul(rows, weight, None, mx.float32) for rows in (x[:rows], x))
    assert_close("out", got, to_numpy(whole)[:rows], 1e-6)


@pytest.mark.parametrize("device", sorted(policy.DEVICES))
def test_plans_cover_every_shape(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "device_policy", lambda: policy.DEVICES[device])
    backend = "metal" if device == "apple" else device
    shorts = (*moe_policy.DEVICES[backend].short_gate_up, *moe_policy.DEVICES[backend].short_down)
    for depth in range(32, 8193, 32):
        plans = policy.matmul_plan(1, 12352, depth), policy.norm_matmul_plan(1, 257, depth)
        for plan in (*plans, *(short.for_depth(depth) for short in shorts)):
            assert isinstance(plan, ShortPlan)
            assert plan.depth % (policy.SHORT_BLOCK * plan.slices) == 0
            share = plan.depth // policy.SHORT_BLOCK // plan.slices
            assert share % plan.ahead == 0 or plan.ahead % share == 0
            assert plan.ahead <= share * -(-depth // plan.depth)
            assert plan.depth < depth + policy.SHORT_BLOCK
            assert plan.threads <= 512
            assert 2 * plan.rows * (plan.depth + 8) + 4 * plan.rows <= 32768
            assert 4 * plan.slices * 2 * plan.columns * (min(plan.rows, 16) + 1) + 4 * plan.rows <= 32768
    rows = policy.DEVICES[device].short.rows
    assert isinstance(policy.matmul_plan(rows, 12352, 2048), ShortPlan)
    assert isinstance(policy.matmul_plan(rows + 1, 12352, 2048), MatmulPlan)
