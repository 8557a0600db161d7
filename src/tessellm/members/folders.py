"""A folder of adapters: subfolders that PEFT saved, each an expert of its folder's name, on the base that they name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MemberError, quoted
from . import sources
from .cards import note_undescribed, read_card
from .spec import LONGEST_NAME, MemberSpec, check_name
from .trained_on import model_words

MOST = 1000  # adapters in a folder
SHOWN = 5  # names in a note
NAMED = "Name it: tessellm compose FOLDER --base BASE -o OUT"


@dataclass(frozen=True)
class AdapterFolder:
    """Adapters by name, their base, and what a user should know of how they were found."""

    path: Path
    base: str
    adapters: Mapping[str, Path]
    styles: tuple[str, ...]  # adapters that concern every prompt: loaded with weight 0
    notes: tuple[str, ...]

    def members(self) -> dict[str, MemberSpec]:
        """Return every expert's specification."""
        return {name: adapter_spec(path) for name, path in self.adapters.items()}


def adapter_spec(path: Path, source: str | None = None) -> MemberSpec:
    """Return the specification of an adapter in that folder: what its card calls a style is silent."""
    is_style = read_card(path).style
    return MemberSpec(source or str(path), weight=0.0 if is_style else 1.0, style=is_style)


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a path is a folder that is no model itself and holds adapters."""
    try:
        folder = Path(path).expanduser()
        own = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        return folder.is_dir() and not own and any(_adapters(folder))
    except (OSError, ValueError):
        return False


def read_adapter_folder(path: str | Path, base: str | None = None) -> AdapterFolder:
    """Find a folder's adapters and their base; `base` names it in place of their configurations."""
    folder = Path(path).expanduser().resolve()
    found = sorted(_adapters(folder))
    if not found:
        raise MemberError(f"{folder} holds no adapters: expected subfolders with an adapter_config.json each")
    if len(found) > MOST:
        raise MemberError(f"{folder} holds {len(found):,} adapters; expected at most {MOST:,}")
    adapters: dict[str, Path] = {}
    for adapter in found:
        name = expert_name(adapter.name)
        check_name(name)
        if name in adapters:
            raise MemberError(f"{adapters[name]} and {adapter} would both be called {name!r}. Rename one of them")
        adapters[name] = adapter
    base, notes = (base, []) if base is not None else _base_of(adapters)
    cards = {name: read_card(adapter) for name, adapter in adapters.items()}
    styles = tuple(name for name, card in cards.items() if card.style)
    notes += [f"{adapter.name} is called {name} here" for name, adapter in adapters.items() if name != adapter.name]
    if left_out := [each.name for each in _subfolders(folder) if each not in found and not _is_base(each, base)]:
        notes.append(f"no adapters, and left out: {_listed(left_out)}")
    if styles:
        woken = f"--weights {styles[0]}=1 wakes it" if len(styles) == 1 else "--weights wakes them"
        notes.append(f"{_listed(styles)}: a style, which concerns every prompt, so it is silent; {woken}")
    if bare := [name for name, card in cards.items() if not card.description and name not in styles]:
        notes.append(note_undescribed(bare))
    return AdapterFolder(folder, base, adapters, styles, tuple(notes))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))


def _adapters(folder: Path) -> Iterable[Path]:
    return (each for each in _subfolders(folder) if (each / "adapter_config.json").is_file())


def _is_base(folder: Path, base: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(base)


def expert_name(folder: str) -> str:
    """Turn a folder's name into an expert's."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", folder)
    return (name if re.match("[A-Za-z_]", name) else f"_{name}")[:LONGEST_NAME]


def _base_of(adapters: Mapping[str, Path]) -> tuple[str, list[str]]:
    """Find the base that adapters name in their configurations, perhaps some of them copies of it."""
    named = {name: stated for name, adapter in adapters.items() if (stated := _stated_base(adapter)) is not None}
    if not named:
        raise MemberError(f"none of {_listed(list(adapters))} says which base it was trained on. {NAMED}")
    kinds = {stated: model_words(stated) for stated in named.values()}
    if len(set(kinds.values())) > 1:
        owners = {stated: [name for name, each in named.items() if each == stated] for stated in kinds}
        told = "; ".join(f"{quoted(stated)} ({_listed(names)})" for stated, names in owners.items())
        raise MemberError(f"the adapters name several bases: {told}. {NAMED}, or keep adapters of one base in a folder")
    counts = Counter(named.values())
    plain = min(len(stated) for stated in counts)  # copies add words to a name
    return _place(max(counts, key=lambda stated: (len(stated) == plain, counts[stated])))


def _stated_base(adapter: Path) -> str | None:
    """Read which base a configuration names; a malformed one is refused when it is loaded."""
    try:
        stated = json.loads((adapter / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(stated, str) or not stated.strip() or len(stated) > sources.LONGEST or "\0" in stated:
        return None
    return os.path.normpath(adapter / stated) if stated.startswith(".") else stated


def _place(stated: str) -> tuple[str, list[str]]:
    """Return where a base is, and notes: the file of an installed package stands in for a hub id that is not here."""
    if sources.exists(Path(stated).expanduser()):
        return stated, []
    short = sources.OF_PACKAGES.get(stated)
    if short is not None and not sources.is_downloaded(stated):
        package = sources.SHORT[short].removeprefix(sources.PACKAGE).partition("/")[0]
        if importlib.util.find_spec(package) is not None:
            project = package.replace("_", "-")
            return short, [
                f"the base {stated} is the file in the installed package {project}; compose --base names another"
            ]
    if not sources.HUB_ID.match(stated):
        raise MemberError(f"the adapters name the base {quoted(stated)}, which is not here. {NAMED}")
    return stated, []


def _listed(names: Iterable[str]) -> str:
    """List names, not more than a line holds."""
    every = [*names]
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")
