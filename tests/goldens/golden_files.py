"""Where the goldens are, and how they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"


def read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))
