"""The caps of Metal's command buffers: raised on Metal, never over a user's own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx.metal.command_buffers import CAPS, CHOICE, MEGABYTES, OPS, raise_caps


@pytest.fixture
def metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


def test_they_are_raised_on_metal(metal):
    environment: dict[str, str] = {}
    raise_caps(environment)
    assert environment == CAPS


def test_a_users_setting_stays(metal):
    environment = {OPS: "20"}
    raise_caps(environment)
    assert environment == {OPS: "20", MEGABYTES: CAPS[MEGABYTES]}


def test_mlx_can_keep_its_own(metal):
    environment = {CHOICE: "mlx"}
    raise_caps(environment)
    assert environment == {CHOICE: "mlx"}


def test_an_unknown_choice_is_refused(metal):
    with pytest.raises(ValueError, match="LILY_MLX_COMMAND_BUFFERS=many"):
        raise_caps({CHOICE: "many"})


def test_nothing_happens_without_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    environment: dict[str, str] = {}
    raise_caps(environment)
    assert environment == {}


def test_a_step_fits_two_command_buffers():
    from compare.lily_trace import decode_graph

    ends = 3  # embedding, head, choice
    of_four_layers = len(decode_graph(256, layers=4).launches) - ends
    assert of_four_layers * 10 + ends <= 2 * int(CAPS[OPS])
