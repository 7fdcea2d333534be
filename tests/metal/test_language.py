"""Every part of Metal's language that our kernels use, on the backend of the test run."""

from __future__ import annotations

import pytest

from .language_cases import Case, cases


@pytest.mark.checked
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_language(case: Case) -> None:
    assert not case.check(case.run())
