"""Commands keep large blocks of memory, so that they are not new pages every time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from tessellm.commands.large_blocks import keep_large_blocks
if sys.argv[1] == "keep":
    keep_large_blocks()
import torch
torch.set_num_threads(1)
for size in (1, 5, 9, 12):  # the process grows
    for _ in range(6):
        torch.ones(size * 1_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*asked: str, **environment: str) -> int:
    given = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | environment
    ran = subprocess.run([sys.executable, "-c", FAULTS, *asked], env=given, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_blocks_are_used_again_unless_the_user_said_otherwise() -> None:
    usual, kept = faults("as it is"), faults("keep")
    if usual < 1000:
        pytest.skip("this C library keeps large blocks anyway, or pages are huge")
    assert kept < usual / 10
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="1000000") > usual / 2
