"""Who speaks, in every command: --rule, --weights, MODEL:MEMBER, --chat and --system, as the server has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.compose import load_members
from tessellm.errors import MemberError
from tessellm.load import load_speaker, split_speaker
from tessellm.serve.refusals import Refusal
from tessellm.serve.targets import Targets

Cli = Callable[..., Any]
PROMPT = "abc 12"


@pytest.fixture(scope="module")
def out(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken") / "out"
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    tessellm.compose(members_dir / "base", experts, rule="product").save_pretrained(folder)
    return folder


def written(model: Any, prompt: str = PROMPT, special: bool = True) -> str:
    """What a model writes by Hugging Face's own means."""
    ids = model.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)["input_ids"]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0]
    return model.tokenizer.decode(tokens[ids.shape[1] :], skip_special_tokens=True)


def test_a_rule_and_weights_of_ones_own(cli: Cli, out: Path) -> None:
    ran = cli("generate", out, PROMPT, "--max-new-tokens", 8, "--rule", "product", "--weights", "lora=0.25")
    model: Any = tessellm.ComposedForCausalLM.from_pretrained(out)
    model.set_rule("product", [1.0, 0.25])
    assert (ran.code, ran.out) == (0, written(model) + "\n")
    found = load_speaker(str(out), rule="product", weights={"lora": 0.25})
    assert (found.config.rule["name"], found.config.weights) == ("product", (1.0, 0.25))


@pytest.mark.parametrize("member", ["base", "math", "lora"])
def test_a_member_alone_writes_what_it_writes_without_us(cli: Cli, out: Path, member: str) -> None:
    composed: Any = tessellm.ComposedForCausalLM.from_pretrained(out)
    own = composed.member(member)
    own.tokenizer = composed.tokenizer
    ran = cli("generate", f"{out}:{member}", PROMPT, "--max-new-tokens", 8)
    assert (ran.code, ran.out) == (0, written(own) + "\n")


@pytest.mark.parametrize(
    ("member", "read"), [("base", {"base"}), ("math", {"base", "math"}), ("lora", {"base", "lora"})]
)
def test_of_a_saved_composition_no_other_expert_is_loaded(
    out: Path, member: str, read: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noting(specs: Any, loading: Any) -> Any:
        asked.extend(specs)
        return load_members(specs, loading)

    monkeypatch.setattr(import_module("tessellm.checkpoint.load"), "load_members", noting)
    found = load_speaker(f"{out}:{member}")
    assert (set(asked), list(found.members)) == (read, [member])


@pytest.mark.parametrize(("member", "read"), [("base", 2), ("lora", 2), ("mth", 3)])
def test_of_a_recipe_no_other_expert_is_loaded(
    members_dir: Path, tmp_path: Path, member: str, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"math": str(members_dir / "math"), "lora": str(members_dir / "lora_math")}
    (tmp_path / "recipe.json").write_text(json.dumps({"base": str(members_dir / "base"), "experts": experts}))
    asked: list[str] = []

    def noting(specs: Any, *given: Any) -> Any:
        asked.extend(specs)
        return load_members(specs, *given)

    monkeypatch.setattr(import_module("tessellm.compose"), "load_members", noting)
    if member == "mth":  # all of them are named
        with pytest.raises(MemberError, match=r"recipe\.json:math'\? Known"):
            load_speaker(f"{tmp_path / 'recipe.json'}:mth")
    else:
        assert list(load_speaker(f"{tmp_path / 'recipe.json'}:{member}").members) == [member]
    assert len(asked) == read


def test_a_folder_with_a_colon_is_a_model(tmp_path: Path) -> None:
    assert split_speaker("out:math") == ("out", "math")
    (tmp_path / "a:b").mkdir()
    assert split_speaker(f"{tmp_path}/a:b") == (f"{tmp_path}/a:b", None)
    assert split_speaker(f"{tmp_path}/a:b:base") == (f"{tmp_path}/a:b", "base")


@pytest.mark.parametrize(
    ("member", "options", "asked"),
    [
        ("", ("--rule", "prodct"), {"rule": "prodct"}),
        ("", ("--weights", "mth=1"), {"weights": {"mth": 1.0}}),
        ("", ("--weights", "math=-2e6"), {"weights": {"math": -2e6}}),
        (":math", ("--rule", "product"), {"rule": "product"}),
        (":math", ("--weights", "math=1"), {"weights": {"math": 1.0}}),
        (":mth", (), {}),
    ],
)
def test_the_server_says_the_same(
    cli: Cli, out: Path, member: str, options: tuple[str, ...], asked: dict[str, Any]
) -> None:
    ran = cli("generate", f"{out}{member}", PROMPT, *options)
    with pytest.raises(Refusal) as refused:
        Targets(tessellm.ComposedForCausalLM.from_pretrained(out), str(out)).find(f"{out}{member}", **asked)
    assert (ran.code, ran.err) == (2, f"error: {refused.value}\n")


def test_a_system_prompt_goes_through_the_template(cli: Cli, out: Path) -> None:
    model: Any = tessellm.ComposedForCausalLM.from_pretrained(out)
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": PROMPT}]
    for given, options in (
        (turns, ("--system", "be")),
        (turns, ("--chat", "--system", "be")),
        (turns[1:], ("--chat",)),
    ):
        text = model.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        ran = cli("generate", out, PROMPT, "--max-new-tokens", 8, *options)
        assert (ran.code, ran.out) == (0, written(model, text, special=False) + "\n")


def test_prompts_for_the_rule_mixture_go_through_the_template_unless_they_were_there(
    cli: Cli, chatting: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = tessellm.compose(**chatting, rule="mixture")
    model.save_pretrained(tmp_path / "out")
    turn = [{"role": "user", "content": PROMPT}]
    text = model.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    asked = ("generate", tmp_path / "out", "--max-new-tokens", 8)
    answer, plain = written(model, text, special=False), written(model)
    assert answer != plain
    for options in ((), ("--trace",)):
        ran = cli(*asked, PROMPT, *options)
        assert answer in ran.out
        assert "went through the chat template" in ran.err
    assert (ran := cli(*asked, PROMPT, "--chat")).out == answer + "\n"
    assert ran.err == ""
    assert cli(*asked, PROMPT, "--no-chat").out == plain + "\n"
    own = PROMPT + model.tokenizer.eos_token  # which a prompt has that was put into a template before
    assert cli(*asked, own).out == written(model, own) + "\n"
    assert cli(*asked, PROMPT, PROMPT).out == f"{PROMPT}\n{answer}\n" * 2


def test_diagnose_says_that_the_rule_mixture_reads_chats(cli: Cli, chatting: dict[str, Any], tmp_path: Path) -> None:
    tessellm.compose(**chatting, rule="mixture").save_pretrained(tmp_path / "out")
    (tmp_path / "p.txt").write_text("abc\n12\n")
    asked = ("diagnose", tmp_path / "out", tmp_path / "p.txt", "--max-new-tokens", 2)
    assert "--chat puts them into the chat template" in cli(*asked).err
    assert cli(*asked, "--chat").err == cli(*asked, "--no-chat").err == ""


def test_an_empty_answer_of_a_chat_model_is_explained(cli: Cli, out: Path, tmp_path: Path) -> None:
    model: Any = tessellm.ComposedForCausalLM.from_pretrained(out)
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    first = int(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)[0, -1])
    model.generation_config.eos_token_id = model.config.eos_token_id = [first]
    model.save_pretrained(tmp_path / "ended")
    ran = cli("generate", tmp_path / "ended", PROMPT)
    assert ran.out.strip() == ""
    assert "nothing was written: this is a chat model, and --chat" in ran.err


def test_diagnose_reads_the_answer_in_its_chat(cli: Cli, out: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc", "text": "12"}\n')
    options = ("--rule", "product", "--json", tmp_path / "found.json")
    assert cli("diagnose", out, tmp_path / "p.jsonl", "--system", "be", *options).code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rule"] == "product"
    assert found["tokens"] == 2  # no token of the template is judged


def test_tune_goes_by_the_rule_and_the_chat(cli: Cli, out: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text('{"prompt": "abc", "text": "12"}\n' * 4)
    ran = cli("tune", out, tmp_path / "dev.jsonl", "--chat", "--weights", "lora=0.5", "--save", tmp_path / "tuned")
    assert ran.code == 0, ran.err
    assert "0.500" in ran.out  # the weight before
    assert tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "tuned").config.rule["name"] == "product"


@pytest.mark.parametrize("options", [("--rule", "product", "--weights", "math=0.5"), ()])
def test_bench_measures_who_was_asked_for(cli: Cli, out: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    model = f"{out}" if options else f"{out}:math"
    sizes = ("--prompt", 8, "--new-tokens", 4, "--json", tmp_path / "b.json")
    ran = cli("bench", model, *sizes, *options)
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["experts"] == (2 if options else 0)


def test_a_request_may_ask_for_the_composition_s_own_rule_or_eq_2(out: Path) -> None:
    served = Targets(load_speaker(str(out), rule="mixture"), "out")
    assert served.rules == ["mixture", "product"]
    assert served.find("out", "mixture").experts is None
    assert served.find("out", "product").experts == {"math": 1.0, "lora": 1.0}
    with pytest.raises(Refusal, match="for a request") as refused:
        served.find("out", "auto")
    assert refused.value.status == 400


def test_a_server_goes_by_a_rule_of_the_command_line(cli: Cli, out: Path) -> None:
    for model, options, told in (
        (out, ("--rule", "produkt"), "there is no rule 'produkt'"),
        (f"{out}:math", (), "is a member and speaks alone"),
    ):
        ran = cli("serve", model, *options, "--port", 0)
        assert (ran.code, told in ran.err) == (2, True), ran.err
