"""The probe finds what a model was trained to know, not what it was not, in models trained here; and says what is
wrong with its input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.errors import MemberError, PromptError
from tessellm_lab.probe.activations import block_names, matching, recorded
from tessellm_lab.probe.labelled import Labelled, read_labelled
from tessellm_lab.probe.probe import Labels, decode, encode, fitting, probe

from conftest import build_model, save_member
from gguf_cases import write_gguf

TEXT_LENGTH = 6


def texts(count: int, seed: int) -> tuple[list[str], list[int], list[int]]:
    """Random letters; the first two say a bit each (a–m: 0, n–z: 1)."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(26, (count, TEXT_LENGTH), generator=generator)
    bits = (letters[:, :2] >= 13).long()
    return ["".join(chr(97 + n) for n in row) for row in letters.tolist()], bits[:, 0].tolist(), bits[:, 1].tolist()


def trained(tokenizer: Any, answer: Callable[[int, int], int], seed: int) -> Any:
    """A tiny model that writes the answer, 0 or 1, after such texts."""
    model = build_model("llama", seed, num_hidden_layers=2)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    zero, one = tokenizer.convert_tokens_to_ids(["0", "1"])
    for step in range(450):
        rows, a, b = texts(64, 1000 * seed + step + 1)
        ids = torch.tensor([tokenizer(row)["input_ids"] for row in rows])
        wanted = torch.tensor([one if answer(x, y) else zero for x, y in zip(a, b, strict=True)])
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, -1], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
    return model.eval()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """`first` writes the first bit, `parity` whether the two differ."""
    folder = tmp_path_factory.mktemp("probed")
    save_member(trained(tiny_tokenizer, lambda a, b: a, 1), folder / "first", tiny_tokenizer)
    save_member(trained(tiny_tokenizer, lambda a, b: a ^ b, 2), folder / "parity", tiny_tokenizer)
    return folder


def labelled(count: int = 160) -> list[Labelled]:
    rows, a, b = texts(count, 0)
    return [
        Labelled(row, {"first": "high" if x else "low", "parity": "odd" if x ^ y else "even", "a": float(x)})
        for row, x, y in zip(rows, a, b, strict=True)
    ]


def numbers(count: int) -> list[Labelled]:
    return [Labelled(example.text, {"a": example.labels["a"]}) for example in labelled(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bits.jsonl"
    path.write_text("".join(json.dumps({"text": e.text, "labels": {"a": e.labels["a"]}}) + "\n" for e in labelled(80)))
    return path


def test_each_member_shows_what_it_was_trained_to_know(members: Path) -> None:
    model = tessellm.compose(members / "first", {"parity": members / "parity"})
    found = probe(model, labelled(), layers=["model.layers.1"])
    scores = {(row.member, row.label): row for row in found}
    assert set(scores) == {(m, label) for m in ("base", "parity") for label in ("first", "parity", "a")}
    assert scores["base", "first"].score.low > 0.9
    assert scores["base", "a"].score.low > 0.7
    assert scores["parity", "parity"].score.low > 0.9
    assert scores["base", "parity"].score.high < 0.75  # nobody told it
    for row in found:
        chance = row.score.chance
        assert abs(sum(row.shuffled) / len(row.shuffled) - chance) < 0.12
        assert row.random_weights is not None
    assert scores["base", "first"].random_weights < scores["base", "first"].score.low
    assert scores["parity", "parity"].random_weights < 0.7


def test_the_command_line_probes_compositions_and_plain_models(
    cli: Any, members: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessellm.commands.shared.out._width", 80)
    ran = cli("probe", members / "first", data, "--json", tmp_path / "plain.json")
    assert ran.code == 0, ran.err
    plain = json.loads((tmp_path / "plain.json").read_text())
    assert {row["layer"] for row in plain["scores"]} == {"model.layers.0", "model.layers.1"}
    assert "weights" in ran.out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {members / 'first'}\nexperts: {{parity: {members / 'parity'}}}\n")
    ran = cli(
        "probe", recipe, data, "--layer", "model.layers.1", "--no-random-weights", "--json", tmp_path / "both.json"
    )
    assert ran.code == 0, ran.err
    both = json.loads((tmp_path / "both.json").read_text())["scores"]
    alone = next(r for r in plain["scores"] if (r["layer"], r["label"]) == ("model.layers.1", "a"))
    beside = next(r for r in both if (r["member"], r["label"]) == ("base", "a"))
    assert beside["score"] == alone["score"]
    assert beside["random_weights"] is None
    assert ran.out.count("model.layers.1") == len(both)  # whole, at eighty columns


def test_any_architecture_and_any_module_can_be_probed(tiny_tokenizer: Any, make_model: Any) -> None:
    for arch, layer in (("gpt2", "transformer.h.0.mlp"), ("gemma2", "model.layers.1.self_attn.q_proj")):
        found = probe(make_model(arch), numbers(40), [layer], tiny_tokenizer, random_weights=False)
        assert {row.layer for row in found} == {layer}
        assert all(torch.isfinite(torch.tensor(row.score.value)) for row in found)


def test_features_are_the_models_own_whatever_the_padding(tiny_tokenizer: Any, make_model: Any) -> None:
    from tessellm_lab.probe.activations import text_features

    model = make_model("llama")
    rows = [tiny_tokenizer(text)["input_ids"] for text in ("abc", "abcdefgh", "z")]

    def run(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask)

    found = text_features(run, model, ["model.layers.0"], rows, [2, 4, 0], batch_size=3)["model.layers.0"]
    for row, at, features in zip(rows, [2, 4, 0], found, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([row]), output_hidden_states=True).hidden_states[1]
        assert torch.allclose(hidden[0, at].double(), features, atol=1e-5)


def test_layers_that_are_not_finite_are_named(make_model: Any) -> None:
    from tessellm_lab.probe.activations import text_features

    model = make_model().eval()

    def run(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask)

    rows = [[5, 6, 7], [5, 9, 7]]
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    with pytest.raises(MemberError, match=r"'model\.layers\.0' gives .* 1 of 2 texts.* text 2; .*embed_tokens\.weight"):
        text_features(run, model, ["model.layers.0"], rows, [2, 2])
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = 3e38
        model.model.layers[0].self_attn.v_proj.weight.fill_(3e38)
    with pytest.raises(MemberError, match="its weights are finite"):
        text_features(run, model, ["model.layers.0"], rows, [2, 2])


def test_positions_are_spans_or_markers(tiny_tokenizer: Any) -> None:
    examples = [
        Labelled("red square", {"x": 1.0}),
        Labelled("red square", {"x": 1.0}, (0, 3)),
        Labelled("red square red", {"x": 1.0}, "red"),
    ]
    rows, positions = encode(tiny_tokenizer, examples, 128)
    assert positions == [9, 2, 13]
    assert [len(row) for row in rows] == [10, 10, 14]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no valid JSON"),
        ("[1]", "got list"),
        ("[" * 100_000, "no valid JSON"),
        ('{"text": "a\\ud800", "labels": {"x": 1}}', "character 2 is half a character"),
        ('{"text": "a", "labels": {"x": 1' + "0" * 400 + "}}", "must be a finite number or a text; got 1000"),
        ('{"text": "a"}', "'labels' must name at least one constituent; got nothing"),
        ('{"text": "", "labels": {"x": 1}}', "'text' must be a text that is not empty"),
        ('{"text": "a", "labels": {"x": NaN}}', "must be a finite number or a text; got nan"),
        ('{"text": "a", "labels": {"x": null}}', "got None"),
        ('{"text": "a", "labels": {"y": 1}}', "differ from those of the first"),
        ('{"text": "a", "labels": {"x": "red"}}', "all numbers or all texts"),
        ('{"text": "a", "labels": {"x": 1}, "positon": "a"}', "did you mean 'position'"),
        ('{"text": "a", "labels": {"x": 1}, "position": "b"}', "does not stand in the text"),
        ('{"text": "a", "labels": {"x": 1}, "position": [0, 2]}', "no span of the text"),
        ('{"text": "a", "labels": {"x": 1}, "position": [true, 1]}', "must be a text or"),
        ('{"text": "a", "labels": {"x": 1}, "group": []}', "'group' must be"),
    ],
)
def test_malformed_lines_are_named_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a", "labels": {"x": 1}}\n\n' + line + '\n{"text": "b", "labels": {"x": 2}}\n')
    with pytest.raises(PromptError, match="line 3: ") as caught:
        read_labelled(path)
    assert reason in str(caught.value)
    examples, problems = read_labelled(path, skip_malformed=True)
    assert [example.text for example in examples] == ["a", "b"]
    assert len(problems) == 1


def test_lines_that_are_no_text_are_named_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "data"  # whatever its name
    path.write_bytes(b'\xef\xbb\xbf{"text": "a", "labels": {"x": 1}}\r\n\xff\xfe\n{"text": "b", "labels": {"x": 2}}')
    with pytest.raises(PromptError, match="line 2 cannot be read: it is not UTF-8"):
        read_labelled(path)
    examples, problems = read_labelled(path, skip_malformed=True)
    assert [(each.text, each.where) for each in examples] == [("a", f"{path}, line 1"), ("b", f"{path}, line 3")]
    assert len(problems) == 1


def test_texts_that_do_not_fit_are_left_out_if_asked(tiny_tokenizer: Any, make_model: Any) -> None:
    given = [Labelled("ab", {"x": 1.0}), Labelled("a" * 200, {"x": 1.0}, where="here, line 2")]
    kept, problems = fitting(make_model("llama"), tiny_tokenizer, given)
    assert kept == given[:1]
    assert problems == ["here, line 2 has 200 tokens; the model's context is 128"]
    with pytest.raises(PromptError, match="none of the examples; here, line 2"):
        fitting(make_model("llama"), tiny_tokenizer, given[1:])


def test_what_cannot_be_judged_is_refused(tiny_tokenizer: Any, make_model: Any, tmp_path: Path) -> None:
    model = make_model("llama")
    with pytest.raises(PromptError, match="too few for 5 folds"):
        probe(model, labelled(4), tokenizer=tiny_tokenizer)
    same = [Labelled(text, {"x": 1.0}) for text in texts(40, 0)[0]]
    with pytest.raises(PromptError, match="the same in every example"):
        probe(model, same, tokenizer=tiny_tokenizer)
    with pytest.raises(PromptError, match="no tokenizer"):
        probe(model, labelled(40))
    with pytest.raises(PromptError, match="context is 128"):
        encode(tiny_tokenizer, [Labelled("a" * 200, {"x": 1.0})], 128)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(PromptError, match="holds no examples"):
        read_labelled(tmp_path / "empty.jsonl")


def test_labels_of_any_size_are_scored_alike() -> None:
    x_ND = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = (x_ND[:, 0] + 0.1 * x_ND[:, 1].sin()) / 8
    scores = []
    for size in (1.0, 1.7e308, 1e-300):
        labels = Labels.of([Labelled(str(n), {"y": float(value) * size}) for n, value in enumerate(near)])
        scores.append(decode(x_ND, labels, torch.arange(40), shuffles=0)["y"][0].value)
    assert scores[0] > 0.9
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-9)


def test_layers_are_named_as_in_the_model(make_model: Any) -> None:
    model = make_model("llama")
    assert block_names(model) == ["model.layers.0", "model.layers.1"]
    assert block_names(make_model("gpt2")) == ["transformer.h.0", "transformer.h.1"]
    assert matching(model, ["model.layers.*.mlp"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    with pytest.raises(MemberError, match=r"did you mean 'model\.layers\.1'"):
        matching(model, ["model.layer.1"])
    with pytest.raises(MemberError, match="hands on one vector a token"):
        probe(model, labelled(40), ["model.rotary_emb"], tokenizer=object_tokenizer(), random_weights=False)


def object_tokenizer() -> Any:
    from conftest import character_tokenizer

    return character_tokenizer()


def test_recording_ends_with_its_block(make_model: Any) -> None:
    model = make_model("llama")
    with recorded(model, ["model.layers.0"], keep=lambda output: output.mean(1)) as outputs, torch.no_grad():
        model(torch.tensor([[5, 6]]))
        model(torch.tensor([[5, 6]]))
    assert [tuple(output.shape) for output in outputs["model.layers.0"]] == [(1, 32), (1, 32)]
    assert not model.model.layers[0]._forward_hooks


def test_a_gguf_file_is_probed(cli: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf")
    rows = [{"text": f"{letter}{n % 2}", "labels": {"digit": str(n % 2)}} for n, letter in enumerate("abcdefgh")]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (tmp_path / "base.gguf", tmp_path / "labelled.jsonl", "--folds", 2, "--layer", "model.layers.0")
    ran = cli("probe", *arguments)
    assert ran.code == 0, ran.err
    assert "digit" in ran.out
