"""Tiny real members: models with random weights, real tokenizers, real PEFT adapters, saved as folders.

tiny_tokenizer          64 tokens, one a character; no beginning-of-text token is added
make_model(arch, seed)  gpt2, llama, gemma2 or qwen2 with two layers, random weights
fine_tune(model, seed)  a copy whose weights moved a little
chatting                a base and two experts (full) whose tokenizer has a chat template, as `compose` takes them
members_dir             base, math, coding (full), lora_math, lora_coding (adapters of base), each a folder
browser                 Chromium, for tests marked so
composed, server, client   a tiny composition, a process that serves it, the official client
locked                  another that asks for a key and has little room
expected                what each of many clients should get
cli(*arguments)         the command line in this process: exit code, stdout, stderr
"""

from __future__ import annotations

import copy
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # what tests download comes from a server of their own
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "160"  # consoles read it when they are made
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)
os.environ["TESSELLM_THREADS"] = "1"  # commands too
transformers.utils.logging.disable_progress_bar()

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;!?()+-*/=<>ABCDEFG"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a: "
CONTEXT = 128
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def character_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """One token a character; decoding gives back the text exactly."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**special, "chat_template": CHAT_TEMPLATE, **settings})


VOCAB = len(SPECIAL) + len(CHARACTERS)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}),
}
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # so that random models have opinions
}


def build_model(arch: str = "llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    name, own = ARCHITECTURES[arch]
    common = {"initializer_range": 0.2} if arch == "gpt2" else COMMON
    ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = getattr(transformers, f"{name}Config")(**{**common, **own, **ids, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        suffix = "LMHeadModel" if arch == "gpt2" else "ForCausalLM"
        return getattr(transformers, name + suffix)(settings).eval()


@torch.no_grad()
def logits(model: Any, length: int = 12) -> torch.Tensor:
    """A model's logits on a fixed text."""
    return model(torch.arange(4, 4 + length)[None]).logits


def perturbed(model: PreTrainedModel, seed: int, scale: float = 0.1, only: str = "") -> PreTrainedModel:
    """A fine-tune: a copy whose parameters (those with `only` in their names) moved a little."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if only in name:
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    return moved


def save_member(model: PreTrainedModel, folder: Path, tokenizer: Any = None, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_lora(base_folder: Path, folder: Path, seed: int = 0, **lora: Any) -> Path:
    """A LoRA adapter of the base in that folder, with weights that do something."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_folder)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **lora}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    peft_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compositions of folders of adapters are kept here, not in the user's home."""
    os.environ["TESSELLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture(scope="session")
def fine_tune() -> Callable[..., PreTrainedModel]:
    return perturbed


@pytest.fixture(scope="session")
def members_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Read it only: tests that change a member copy it first (see `own_members`)."""
    folder = tmp_path_factory.mktemp("members")
    base = build_model("llama", 0)
    save_member(base, folder / "base", tiny_tokenizer)
    save_member(perturbed(base, 1), folder / "math", tiny_tokenizer)
    save_member(perturbed(base, 2, only="layers.1"), folder / "coding", tiny_tokenizer)
    save_lora(folder / "base", folder / "lora_math", 3)
    save_lora(folder / "base", folder / "lora_coding", 4)
    return folder


@pytest.fixture
def own_members(members_dir: Path, tmp_path: Path) -> Path:
    """A copy of the members that a test may change."""
    return Path(shutil.copytree(members_dir, tmp_path / "members"))


@pytest.fixture(scope="session")
def composed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A composition that servers serve, and its folder."""
    from servers import tiny

    return tiny(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(composed: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`tessellm serve` on it, for all tests that leave it running."""
    from servers import serving

    with serving(composed[1], tmp_path_factory.mktemp("log") / "server.txt", "--slots", "8") as running:
        yield running


@pytest.fixture(scope="session")
def locked(composed: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with the key sésame, two slots and twenty places before them. test_stopping.py, the last, stops it."""
    from servers import serving

    log, room = tmp_path_factory.mktemp("log") / "locked.txt", ("--slots", "2", "--queue", "20")
    with serving(composed[1], log, *room, env={"TESSELLM_API_KEY": "sésame\n"}) as running:
        running.http.headers["authorization"] = "Bearer sésame"
        yield running


@pytest.fixture(scope="session")
def expected(composed: tuple[Any, Path]) -> list[str]:
    """What the engine writes for each client of clients.py, one at a time."""
    from tessellm.engine.engine import Engine
    from tessellm.engine.sampling import Sampling

    from clients import CLIENTS, NEW, prompt

    model, tokenizer = composed[0], composed[0].tokenizer
    rows = [tokenizer(prompt(number))["input_ids"] for number in range(CLIENTS)]
    requests = Engine(model, slots=1).generate(rows, Sampling(NEW))
    return [tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]


@pytest.fixture(scope="session")
def client(server: Any) -> Any:
    """The official client of that server."""
    return server.client()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium: the system's, else the one that playwright brings."""
    sync_api = pytest.importorskip("playwright.sync_api")
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


def press_ctrl_c(*_: object, **__: object) -> str:
    """As if someone pressed it now; heard even where the tests are a background job, which a shell makes deaf to it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _interrupted(signal.SIGINT)


def told_to_end(*_: object, **__: object) -> str:
    """As if `kill` were run now."""
    return _interrupted(signal.SIGTERM)


def _interrupted(number: signal.Signals) -> str:
    signal.raise_signal(number)
    time.sleep(10)  # which it interrupts
    return ""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command line in this process, through its entry point."""

    def run(*arguments: object) -> Ran:
        from tessellm.cli import main

        monkeypatch.setattr(sys, "argv", ["tessellm", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "160")
        capsys.readouterr()
        code: Any = 0
        before = signal.getsignal(signal.SIGINT)
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            signal.signal(signal.SIGINT, before)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sources of a base and two experts whose tokenizer has a chat template."""
    folder, base = tmp_path_factory.mktemp("chatting"), build_model(max_position_embeddings=512)
    tokenizer = character_tokenizer()
    save_member(base, folder / "base", tokenizer)
    for seed, name in enumerate(("one", "two")):
        save_member(perturbed(base, seed + 1), folder / name, tokenizer)
    return {"base": str(folder / "base"), "experts": {name: str(folder / name) for name in ("one", "two")}}


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage again and again takes a tenth of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # bindings of libraries would call it a leak
