"""The server against its own description: schemathesis makes requests of it, and answers must be what it promises.

A few dozen on every run; `make test-api` (API_EXAMPLES=600) makes thousands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from servers import PATIENCE, Running

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
EXAMPLES = int(os.environ.get("API_EXAMPLES", "15"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.timeout(3600)
def test_answers_are_what_the_description_promises(server: Running, tmp_path: Path) -> None:
    phases = "coverage,fuzzing" if EXAMPLES >= 100 else "fuzzing"
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"]
    command += ["--checks", CHECKS, "--phases", phases, "--max-examples", str(EXAMPLES), "--seed", "0", "--no-color"]
    command += ["--request-timeout", str(PATIENCE)]  # a busy machine is no failure; a request that hangs is
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:]
    found = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert found, ran.stdout
    assert found[1] == found[2]
    assert int(found[1]) >= (2000 if EXAMPLES >= 600 else EXAMPLES)
    print(found[0])
    server.wait_until_idle()
