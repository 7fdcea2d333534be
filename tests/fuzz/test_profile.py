"""The fuzz tests' own machinery: it finds faults, makes them small, repeats itself, and ends in time."""

from __future__ import annotations

import time

import pytest
from hypothesis import strategies as st

from . import profile
from .profile import choice, fuzz


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setattr(profile, "LONG", True)


def test_a_fault_is_found_and_made_small(long):
    @fuzz(5, rows=st.integers(1, 1000), columns=st.integers(1, 1000))
    def check(rows, columns):
        assert rows < 50, f"rows {rows} columns {columns}"

    with pytest.raises(AssertionError, match=r"rows 50 columns 1\b"):
        check(fuzz_seconds=20.0)


def test_a_fault_in_the_last_moment_is_made_small_too(long):
    start = time.monotonic()

    @fuzz(5, rows=st.integers(1, 1000))
    def check(rows):
        time.sleep(0.01)
        assert time.monotonic() - start < 0.15 or rows < 50, f"rows {rows}"

    with pytest.raises(AssertionError, match=r"rows 50\b"):
        check(fuzz_seconds=0.2)


def test_the_long_profile_ends_in_time(long):
    tried = []

    @fuzz(5, rows=st.integers(1, 10**9))
    def check(rows):
        tried.append(rows)
        time.sleep(0.01)

    start = time.monotonic()
    check(fuzz_seconds=0.5)
    assert 0.4 < time.monotonic() - start < 5
    assert len(set(tried)) > 5


def test_the_short_profile_repeats_itself(monkeypatch):
    monkeypatch.setattr(profile, "LONG", False)
    tried: list[int] = []

    @fuzz(6, rows=st.integers(1, 10**9))
    def check(rows):
        tried.append(rows)

    check(fuzz_seconds=0.0)
    check(fuzz_seconds=0.0)
    assert len(tried) == 12
    assert tried[:6] == tried[6:]


@pytest.mark.parametrize("is_long", [False, True])
def test_choices_of_both_profiles(monkeypatch, is_long):
    monkeypatch.setattr(profile, "LONG", is_long)
    seen = set()

    @fuzz(30, value=choice((1, 2), tuple(range(100))))
    def check(value):
        seen.add(value)

    check(fuzz_seconds=0.3)
    assert (max(seen) > 2) is is_long
