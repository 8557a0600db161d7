"""Where a member's files are: a local folder or a hub repository, made a local folder of safetensors.

Knows paths, downloads and whether files are whole. Does not know models or rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MemberError

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Source:
    """A member's folder on this machine, and where it came from."""

    directory: Path
    hub_id: str | None = None
    revision: str | None = None  # the commit, where it came from a hub

    @property
    def is_adapter(self) -> bool:
        return (self.directory / "adapter_config.json").is_file()


def find(source: str | Path, name: str, revision: str | None = None, **download: Any) -> Source:
    """The member's folder; hub repositories are downloaded, safetensors only."""
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise MemberError(f"member {name!r}: {path} is a local folder, which has no revision {revision!r}")
        return Source(path.resolve())
    if path.exists():
        raise MemberError(f"member {name!r}: expected a folder or a hub id, but {path} is a file")
    if not HUB_ID.match(str(source)) or str(source).startswith((".", "~", os.sep)):
        raise MemberError(
            f"member {name!r}: there is no folder {source}. Expected the folder of a checkpoint or adapter, or a hub "
            "id such as google/gemma-2-2b"
        )
    return _download(str(source), name, revision, **download)


def _download(hub_id: str, name: str, revision: str | None, **download: Any) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    skipped = [] if download.pop("nested", False) else ["*/*"]  # only compositions keep weights in subfolders
    if download.pop("trust_remote_code", False):
        patterns.append("*.py")
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=skipped,
            **download,
        )
    except GatedRepoError as error:
        raise MemberError(
            f"member {name!r}: {hub_id} is gated. Accept its licence on its page, then set HF_TOKEN to a token of "
            "that account (or run `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise MemberError(f"member {name!r}: {hub_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise MemberError(
            f"member {name!r}: no repository {hub_id} on the hub, and no folder of that name here. Check the spelling; "
            "if it is private, set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise MemberError(
            f"member {name!r}: {hub_id} is no folder here, and the hub cannot be reached or refused "
            f"({type(error).__name__}). Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give the path of a folder"
        ) from error
    return Source(Path(folder), hub_id, Path(folder).name)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, in order, as its index lists them."""
    for stem in ("model", "adapter_model"):
        index = directory / f"{stem}.safetensors.index.json"
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            return [Path(os.path.normpath(directory / name)) for name in sorted(names)]
        if (directory / f"{stem}.safetensors").is_file():
            return [directory / f"{stem}.safetensors"]
    return []


def check_files(directory: Path, name: str) -> list[Path]:
    """The weight files, after a look at each: all there, all whole, none of them pickles."""
    if not any((directory / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise MemberError(
            f"member {name!r}: {directory} holds neither config.json nor adapter_config.json. Expected the folder of a "
            "Hugging Face checkpoint or of a PEFT adapter"
        )
    files = weight_files(directory)
    if not files:
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise MemberError(
                f"member {name!r}: {directory} holds its weights as pickles ({', '.join(pickles[:3])}), which can run "
                "code when read. Only safetensors are read; convert with model.save_pretrained(folder)"
            )
        raise MemberError(f"member {name!r}: {directory} holds no weights (expected model.safetensors)")
    for file in files:
        problem = safetensors_problem(file)
        if problem:
            raise MemberError(f"member {name!r}: {file} {problem}. Copy or download it again")
    return files


def safetensors_problem(file: Path) -> str | None:
    """What is wrong with a safetensors file, from its header and its size alone; None if it is whole."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            return f"is cut off ({size} bytes, not even its header)"
        try:
            header = json.loads(stream.read(length))
            end = max(
                (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is not a safetensors file (its header cannot be read)"
    if 8 + length + end != size:
        return f"is cut off or damaged ({size} bytes, expected {8 + length + end})"
    return None


def digest(files: list[Path]) -> str:
    """One sha256 over files, in the order given."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
