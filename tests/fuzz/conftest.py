from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.cases import make_good


@pytest.fixture(scope="package")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the undamaged files, of which each case damages a copy."""
    folder = tmp_path_factory.mktemp("good")
    make_good(folder)
    return folder
