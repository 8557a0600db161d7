"""Where members are: folders, a hub of our own over HTTP, and everything that can be wrong with either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.errors import MemberError
from tessellm.members.sources import check_files, digest, find, safetensors_problem, weight_files

import hub
from conftest import logits

TRY_ALL = """
import json, sys, tessellm
answers = []
for base, revision, token in json.loads(sys.argv[1]):
    try:
        member = {"source": base, "revision": revision}
        model = tessellm.compose(member, {"x": "team/math"}, token=token)
        folder = model.loaded_members[0].source.directory
        answers.append([model.config.members, sorted(path.name for path in folder.iterdir())])
    except tessellm.TessellmError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def endpoint(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hub")
    pickled = folder / "pickled"
    shutil.copytree(members_dir / "base", pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({}, pickled / "pytorch_model.bin")
    shutil.copytree(members_dir / "base", folder / "base")
    (folder / "base" / "original").mkdir()
    (folder / "base" / "original" / "model.safetensors").write_bytes(b"large and not needed")
    (folder / "base" / "code.py").write_text("raise SystemExit('this must not run')")
    folders = {"base": folder / "base", "math": members_dir / "math", "pickled": pickled}
    folders |= dict.fromkeys(("gated", "private"), members_dir / "base")
    repositories = {f"team/{name}": path for name, path in folders.items()}
    with hub.serve(repositories, gated={"team/gated"}, private={"team/private"}) as address:
        yield address


def ask(tries: list[tuple[str, str | None, str | None]], home: Path, endpoint: str) -> list:
    """Compose from those hub ids in a process of its own, which sees that hub."""
    kept = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    ran = subprocess.run(
        [sys.executable, "-c", TRY_ALL, json.dumps(tries)],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_hub_repositories(endpoint: str, tmp_path: Path) -> None:
    """One process, many repositories: it takes seconds to start."""
    tries = [
        ("team/base", None, None),
        ("team/gated", None, None),
        ("team/private", None, None),
        ("team/missing", None, None),
        ("team/base", "no-such-branch", None),
        ("team/pickled", None, None),
        ("team/gated", None, hub.TOKEN),
        ("team/private", hub.COMMIT, hub.TOKEN),
    ]
    taken, gated, private, missing, revision, pickled, *opened = ask(tries, tmp_path, endpoint)
    members, files = taken
    assert [(m["source"], m["revision"]) for m in members] == [("team/base", hub.COMMIT), ("team/math", hub.COMMIT)]
    assert "model.safetensors" in files
    assert not {"original", "code.py"} & set(files)
    assert gated.startswith("member 'base': team/gated is gated. Accept its licence on its page, then set HF_TOKEN")
    for answer in (private, missing):
        assert "no repository team/" in answer
        assert "Check the spelling; if it is private, set HF_TOKEN" in answer
    assert revision == "member 'base': team/base has no revision 'no-such-branch'"
    assert "team/pickled holds its weights as pickles (pytorch_model.bin)" in pickled
    for members, _ in opened:
        assert members[0]["revision"] == hub.COMMIT
    check_offline(tmp_path / "hub", tmp_path / "out")


def check_offline(cache: Path, target: Path) -> None:
    """What was downloaded serves without the hub (this process is offline), and links keep the commit."""
    model = tessellm.compose("team/gated", {"x": "team/math"}, cache_dir=str(cache))
    model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    assert [(m["source"], m["revision"]) for m in config["members"]] == [
        ("team/gated", hub.COMMIT),
        ("team/math", hub.COMMIT),
    ]
    assert "base_model: [team/gated, team/math]" in (target / "README.md").read_text()
    again = AutoModelForCausalLM.from_pretrained(target, cache_dir=str(cache))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(
        MemberError, match=r"team/unseen is no folder here, and the hub could not be reached.*HF_ENDPOINT"
    ):
        tessellm.compose("team/unseen", {"x": "team/math"}, cache_dir=str(cache))


def refusal(path: object, **options: object) -> str:
    with pytest.raises(MemberError) as caught:
        find(path, "member 'math'", **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_paths_that_are_no_members(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("no folder")
    assert "there is no folder" in refusal(tmp_path / "nowhere")
    assert "there is no folder ./nowhere" in refusal("./nowhere")
    assert "there is no folder a/b/c" in refusal("a/b/c")
    assert f"but {file} is another file" in refusal(file)
    assert "has no revision 'main'" in refusal(tmp_path, revision="main")


def check(folder: Path) -> str:
    with pytest.raises(MemberError) as caught:
        check_files(folder, "member 'math'")
    assert str(caught.value).startswith(("member 'math': ", str(folder)))
    return str(caught.value)


def test_folders_that_hold_no_member(tmp_path: Path) -> None:
    assert "holds neither config.json nor adapter_config.json" in check(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "expected model.safetensors" in check(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "pickles (pytorch_model-00001-of-00002.bin)" in check(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safe')
    assert "model.safetensors.index.json is cut off or damaged" in check(tmp_path)
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert "model-00001-of-00001.safetensors is missing" in check(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    assert check_files(tmp_path, "x") == [tmp_path / "model-00001-of-00001.safetensors"]


def test_a_single_file_is_taken_before_an_index_as_transformers_does(members_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(members_dir / "base", tmp_path / "both")
    (tmp_path / "both" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    assert [file.name for file in weight_files(tmp_path / "both")] == ["model.safetensors"]


@given(st.data())
def test_every_cut_of_a_safetensors_file_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, file)
    whole = file.read_bytes()
    assert safetensors_problem(file) is None
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert "is cut off" in str(safetensors_problem(file))


def test_other_damage_to_a_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    assert safetensors_problem(file) == "is missing"
    file.write_bytes(b"\x08" + b"\0" * 7 + b"no json!" + b"\0" * 8)
    assert "is not a safetensors file" in str(safetensors_problem(file))
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 99\n")
    assert "is cut off" in str(safetensors_problem(file))


def test_a_digest_tells_contents_and_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert len({digest([one, two]), digest([two, one]), digest([one])}) == 3
    assert digest([one]) == digest([one])
