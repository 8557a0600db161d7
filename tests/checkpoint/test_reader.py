"""config.json and weight files as a hand, another program or a broken disk leaves them: one message each, at once."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.checkpoint.reader import SavedComposition, read_config
from tessellm.errors import CheckpointError, TessellmError
from tessellm.members.sources import check_files, safetensors_problem, weight_files

from checkpoints import save

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def saved(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "out"
    save("linked", members_dir, folder)
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A copy whose config may be spoilt; its links still hold."""
    target = Path(shutil.copytree(saved, tmp_path / "out"))
    config = json.loads((target / "config.json").read_text())
    for member in config["members"]:
        member["source"] = str((saved / member["source"]).resolve())
    (target / "config.json").write_text(json.dumps(config))
    return target


def spoil(folder: Path, change: Change) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return folder


def member(number: int, **changes: Any) -> Change:
    return lambda config: config["members"][number].update(changes)


def without(number: int, key: str) -> Change:
    return lambda config: config["members"][number].pop(key)


WRONG: dict[str, tuple[Change, str]] = {
    "twice": (member(2, name="math"), "two members are called 'math'"),
    "no name": (without(1, "name"), "the key 'members.1.name' is missing"),
    "no weight": (without(1, "weight"), "the key 'members.1.weight' is missing"),
    "no ends": (without(1, "end_ids"), "the key 'members.1.end_ids' is missing"),
    "source": (member(1, source=5), "members.1.source: expected a path, a hub id or a package's file; got 5"),
    "long": (member(1, source="./" + "a" * 5000), "(5004 characters)"),
    "weight": (member(1, weight="1"), "members.1.weight: expected a number within ±1,000,000; got '1'"),
    "huge": (member(1, weight=1e9), "members.1.weight: expected a number within ±1,000,000; got 1000000000.0"),
    "kind": (member(1, kind="half"), "members.1.kind: expected full or adapter; got 'half'"),
    "ends": (member(1, end_ids=[-1]), "members.1.end_ids: expected a list of token ids; got -1"),
    "end beyond": (member(1, end_ids=[64]), "an end token has the id 64, beyond the vocabulary of 64"),
    "dtype": (
        member(1, dtype="float8"),
        "members.1.dtype: expected float32, bfloat16, float16, float64, int8 or int4; got 'float8'",
    ),
    "quantization": (member(1, quantization="bnb-4bits"), "unknown quantization 'bnb-4bits'; did you mean 'bnb-4bit'?"),
    "stamp": (member(1, stamp={"sha256": 5}), "members.1.stamp: expected the sha256 and the sizes of files; got 5"),
    "key": (member(1, wieght=1.0), "unknown key 'members.1.wieght'; did you mean 'weight'?"),
    "list": (lambda config: config.update(members=[1, 2]), "members.0: expected a mapping with the keys name, kind"),
    "one": (lambda config: config.update(members=config["members"][:1]), "members: expected a list of members"),
    "text": (lambda config: config.update(members="all"), "members: expected a list of members"),
    "order": (lambda config: config["members"].reverse(), "the first member must be the base, a full model"),
    "name": (member(1, name="a/b"), "'a/b' cannot be an expert's name"),
    "size": (lambda config: config.update(vocab_size=-1), "vocab_size: expected a whole number, not negative; got -1"),
    "context": (lambda config: config.update(max_position_embeddings="long"), "got 'long'"),
    "rule": (lambda config: config.update(rule=[]), "rule: expected a mapping with the key name"),
    "no rule": (lambda config: config.pop("rule"), "the key 'rule' is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_spoilt_config_is_explained(own: Path, case: str) -> None:
    change, says = WRONG[case]
    spoil(own, change)
    with pytest.raises(CheckpointError) as caught:
        tessellm.ComposedForCausalLM.from_pretrained(own)
    message = str(caught.value)
    assert message.startswith(f"{own / 'config.json'} is damaged: ")
    assert says in message
    assert "\n" not in message
    assert len(message) < 1000
    assert "pydantic" not in message.lower()


def test_what_is_written_is_what_is_read(saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    read = SavedComposition.model_validate(content)
    assert [each.entry() for each in read.members] == content["members"]


def test_a_config_that_is_no_json_or_too_large(own: Path) -> None:
    for text in (
        "[" * 10000,
        '{"model_type": "tessellm"',
        "[]",
        '"tessellm"',
        "\ud800".encode("utf-8", "surrogatepass"),
    ):
        (own / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(CheckpointError, match=r"config\.json is cut off or damaged"):
            read_config(own)
    (own / "config.json").write_text('{"model_type": "tessellm", "x": "' + "a" * (17 << 20) + '"}')
    with pytest.raises(CheckpointError, match=r"config\.json is cut off or damaged"):
        read_config(own)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4)


@given(st.sampled_from(["members", "rule", "vocab_size", "eos_token_id", "notes", "pad_token_id"]), JSON)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_any_key_is_taken_or_explained(own: Path, key: str, value: Any) -> None:
    file = own / "config.json"
    whole = file.read_text()
    file.write_text(json.dumps({**json.loads(whole), key: value}))
    with suppress(TessellmError):  # anything else that is raised fails the test
        read_config(own)
    file.write_text(whole)


def header(folder: Path, content: Any) -> Path:
    text = json.dumps(content).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]},
        {"dtype": 5, "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F32", "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": 5, "data_offsets": [0, 0]},
        5,
    ],
)
def test_headers_that_are_none(tmp_path: Path, entry: Any) -> None:
    problem = safetensors_problem(header(tmp_path, {"w": entry}))
    assert problem == "is not a safetensors file (its header cannot be read)"


def test_an_index_names_files_of_its_own_folder(own_members: Path) -> None:
    folder = own_members / "math"
    shutil.move(folder / "model.safetensors", folder / "own.safetensors")
    index = folder / "model.safetensors.index.json"
    for wrong in (5, None, ["own.safetensors"], "a" * 5000, "a\0b"):
        index.write_text(json.dumps({"weight_map": {"w": wrong}}))
        with pytest.raises(TessellmError, match=r"index\.json is cut off or damaged"):
            weight_files(folder)
    for outside in ("../base/model.safetensors", "/etc/passwd", "../../shared/x.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": outside}}))
        if own_members.name == "members" and "shared" in outside:
            assert weight_files(folder) == [own_members.parent / "shared" / "x.safetensors"]  # as compositions store it
            continue
        with pytest.raises(TessellmError, match="is outside its folder"):
            weight_files(folder)
    index.write_text(json.dumps({"weight_map": {"w": "a" * 300}}))
    with pytest.raises(TessellmError, match="is missing"):
        check_files(folder, "member 'math'")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": -1}, "hidden_size: expected a whole number from 1 to 16,777,215; got -1"),
        ({"hidden_size": 0}, "got 0"),
        ({"vocab_size": "64"}, "vocab_size: expected a whole number from 1 to 16,777,215; got '64'"),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers: expected at most the 21 tensors of its weights; got 1000000",
        ),
        ({"num_attention_heads": 10**100}, "num_attention_heads: expected a whole number"),
        ({"text_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers: expected at most the 21 tensors"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(own_members: Path, change: dict[str, Any], says: str) -> None:
    file = own_members / "math" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    begun = time.monotonic()
    with pytest.raises(TessellmError) as caught:
        tessellm.compose(own_members / "base", {"math": own_members / "math"})
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"member 'math': {file}: ")
    assert time.monotonic() - begun < 20


def test_hugging_faces_own_door_says_it_too(own: Path) -> None:
    spoil(own, member(2, name="math"))
    with pytest.raises(CheckpointError, match="two members are called 'math'"):
        AutoModelForCausalLM.from_pretrained(own)
