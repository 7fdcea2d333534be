from __future__ import annotations

import pytest

from .report_folder import Folder


@pytest.fixture
def folder(tmp_path):
    """See `report_folder.Folder`."""
    return Folder(tmp_path)
