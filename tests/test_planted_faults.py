"""The faults that scripts/planted_faults.py plants have their places, and what would notice them
is there.
"""

from __future__ import annotations

import pytest

from scripts.planted_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_tests_that_exist(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.before) == 1
    assert all((ROOT / path).exists() for path in fault.tests)
