"""`python -m tessellm.serve MODEL[:MEMBER] [SLOTS] [CONTEXT]`: a server at any free port, also for one member alone,
which `tessellm serve` never is: what a composition's latency is measured against."""

from __future__ import annotations

import sys
from pathlib import Path

from ..load import load_speaker, split_speaker
from .server import serve
from .settings import Settings


def main(model: str, slots: str | None = None, context: str | None = None) -> None:
    name = Path(split_speaker(model)[0]).resolve().stem
    settings = Settings(port=0, slots=int(slots) if slots else None, context=int(context) if context else None)
    serve(lambda: load_speaker(model), name, settings, lambda url: print(f"{name} at {url}", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
