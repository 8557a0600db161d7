"""Where the demo's experts lie: in the clone of the repository that this is, or in a folder that the user names."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MemberError, TessellmError

REPOSITORY = Path(__file__).resolve().parents[3]
ADAPTERS = "TESSELLM_REAL_ADAPTERS"  # an environment variable
DOMAINS = ("math", "bash", "intents", "sql", "code")


def adapters_folder(given: Path | None = None) -> Path:
    """The folder with an adapter per skill: as given, else what the environment names, else the repository's."""
    return repository_folder(given, ADAPTERS, "adapters/smollm2")


def repository_folder(given: Path | None, variable: str, usual: str) -> Path:
    """The folder given, else the one that the environment variable names, else `usual` in the repository."""
    named = given if given is not None else Path(os.environ.get(variable, REPOSITORY / usual)).expanduser()
    if not named.is_dir():
        raise TessellmError(
            f"there is no folder {named}. Run it from a clone of the repository, or name the folder in {variable}"
        )
    return named


def find_experts(adapters: Path | None) -> dict[str, Path]:
    """The folder of each domain's adapter: in the folder given, or in the repository."""
    try:
        folder = adapters_folder(adapters)
    except TessellmError as error:
        raise MemberError(f"the demo needs the adapters of its repository: {error}, or with --adapters") from None
    experts = {name: folder / name for name in DOMAINS}
    missing = [name for name, place in experts.items() if not (place / "adapter_config.json").is_file()]
    if missing:
        raise MemberError(
            f"{folder} lacks the adapters {', '.join(missing)}. The demo needs those of its repository's folder "
            "adapters/smollm2; name another with --adapters"
        )
    return experts
