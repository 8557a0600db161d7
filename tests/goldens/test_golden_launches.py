"""Steps launch what they did when the goldens were recorded: kernels, grids, arguments and constants.

The goldens were made by what had been measured on an H200. Equal launches mean that the same would run there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1 (make test-kernels)", allow_module_level=True)

from golden_compare import launch_differences
from golden_files import read
from launch_goldens import SCENARIOS, launches


@pytest.mark.parametrize("name", SCENARIOS)
def test_launches(name: str, tmp_path: Path) -> None:
    golden = read("launches.json.gz")
    expected = [golden["launches"][number] for number in golden["scenarios"][name]]
    found = launch_differences(name, expected, launches(SCENARIOS[name], tmp_path))
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])
