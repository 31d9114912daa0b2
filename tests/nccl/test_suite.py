"""Every case of the suite as a test; `python -m tests.nccl` runs the same without pytest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nccl.lanes import Verdict
from tests.nccl.runner import all_cases

pytestmark = [pytest.mark.gpu, pytest.mark.wide]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_case(case: Any, verdicts: dict[str, Verdict]) -> None:
    assert verdicts[case.name].ok, verdicts[case.name].note
