"""Compositions of tiny members, vLLM engines for them, and what both engines say: for every test of the plugin.

CPU attention in vLLM wants heads of 32 or more, so the members are a little larger than elsewhere in the tests.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1"
)
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import openai
import torch

import tessellm
from tessellm.routing import ChatMarks

from conftest import VOCAB, build_model, character_tokenizer, perturbed, save_lora, save_member

CONTEXT, NEW = 192, 16
TIE = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "max_position_embeddings": CONTEXT},
    "qwen2": {"hidden_size": 128, "max_position_embeddings": CONTEXT},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "max_position_embeddings": CONTEXT},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_positions": CONTEXT},
}


def member(arch: str, seed: int, **changes: Any) -> Any:
    return build_model(arch, seed, **{**SHAPES[arch], **changes})


def alike(folder: Path, arch: str, seed: int = 0, **changes: Any) -> dict[str, Path]:
    """A base and two fine-tunes of one shape."""
    base = member(arch, seed, **changes)
    models = {"base": base, "math": perturbed(base, seed + 1, 0.05), "coding": perturbed(base, seed + 2, 0.05)}
    return {name: save_member(model, folder / name, character_tokenizer()) for name, model in models.items()}


def of_other_shapes(folder: Path, seed: int = 0) -> dict[str, Path]:
    models = {
        "base": member("llama", seed),
        "math": member("llama", seed + 1, num_hidden_layers=3, num_key_value_heads=4, intermediate_size=96),
        "coding": member("llama", seed + 2, hidden_size=64, head_dim=64),
    }
    return {name: save_member(model, folder / name, character_tokenizer()) for name, model in models.items()}


def of_other_architectures(folder: Path, seed: int = 0) -> dict[str, Path]:
    models = {"base": member("gemma2", seed), "math": member("llama", seed + 1), "coding": member("gpt2", seed + 2)}
    return {name: save_member(model, folder / name, character_tokenizer()) for name, model in models.items()}


def adapted(folder: Path, seed: int = 0) -> dict[str, Path]:
    """A base, two adapters of it (one with every linear layer, one with its own scale a layer), and a fine-tune."""
    base = save_member(member("llama", seed), folder / "base", character_tokenizer())
    everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {
        "base": base,
        "math": save_lora(base, folder / "math", seed + 3, target_modules=everywhere),
        "coding": save_lora(base, folder / "coding", seed + 4, r=8, use_rslora=True, alpha_pattern={"v_proj": 3}),
        "full": save_member(perturbed(member("llama", seed), seed + 5, 0.05), folder / "full", character_tokenizer()),
    }


def adapters(folder: Path, seed: int = 0) -> dict[str, Path]:
    """A base and two adapters of it: what vLLM's own multi-LoRA can serve."""
    return {name: path for name, path in adapted(folder, seed).items() if name != "full"}


def of_other_ids(folder: Path, seed: int = 0) -> dict[str, Path]:
    """One expert has its tokens in another order, the other has rows of padding."""
    from tokenizers import Tokenizer

    paths = alike(folder, "llama", seed)
    tokenizer = character_tokenizer()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["model"]["vocab"] = {token: int(order[i]) for token, i in core["model"]["vocab"].items()}
    for entry in core["added_tokens"]:
        entry["id"] = int(order[entry["id"]])
    permuted = type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    ids = {"pad_token_id": int(order[0]), "bos_token_id": int(order[1]), "eos_token_id": int(order[2])}
    save_member(member("llama", seed + 1, **ids), folder / "math", permuted)
    save_member(member("llama", seed + 2, vocab_size=VOCAB + 10), folder / "coding", tokenizer)
    return paths


FAMILIES: dict[str, Callable[[Path, int], dict[str, Path]]] = {
    "llama": lambda folder, seed: alike(folder, "llama", seed),
    "gemma2": lambda folder, seed: alike(folder, "gemma2", seed),
    "shapes": of_other_shapes,
    "architectures": of_other_architectures,
    "lora": adapted,
    "adapters": adapters,
    "vocabulary": of_other_ids,
}


RULES: dict[str, dict[str, Any]] = {
    "product": {"rule": "product"},
    "mixture": {"rule": "mixture", "router": False},
    "routed": {"rule": {"name": "mixture", "alone": 0.9}, "base_retention": 0.3},  # so that members share prompts
    "default": {"base_retention": 0.3},
}


@dataclass(frozen=True)
class Composition:
    """A saved composition and the same one in transformers."""

    folder: Path
    reference: Any


def composition(
    folder: Path, family: str, kind: str, self_contained: bool = False, seed: int = 0, **options: Any
) -> Composition:
    members = FAMILIES[family](folder / "members", seed)
    experts = {name: str(path) for name, path in members.items() if name != "base"}
    # eager: the other attention of transformers leaves out the soft cap of Gemma 2's
    settings = {**RULES[kind], "attn_implementation": "eager", **options}
    os.environ["TESSELLM_CACHE"] = str(folder / "cache")  # of routers
    reference = tessellm.compose(str(members["base"]), experts, **settings)
    reference.save_pretrained(folder / "composed", self_contained=self_contained)
    return Composition(folder / "composed", reference)


def prompts(count: int = 52, longest: int = 150, seed: int = 0) -> list[list[int]]:
    """Random texts, without the template's marks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    return [torch.randint(4, VOCAB, (int(n),), generator=generator).tolist() for n in lengths]


def chat(message: Sequence[int]) -> list[int]:
    """A message in the chat template."""
    marks = ChatMarks.of(character_tokenizer())
    return [*marks.prefix, *message, *marks.answer]


def chats(count: int = 52, longest: int = 140, seed: int = 0) -> list[list[int]]:
    """Random messages in the chat template: it tells vLLM where answers begin, as the length tells `generate`."""
    return [chat(message) for message in prompts(count, longest, seed)]


@dataclass(frozen=True)
class Said:
    """What an engine continued one prompt with, and how probable it found each token."""

    tokens: list[int]
    logprobs: list[float]
    gap: list[float]  # to the second best, where known


@torch.inference_mode()
def transformers_says(model: Any, asked: Sequence[Sequence[int]], new: int = NEW) -> list[Said]:
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in asked])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logp_TBV = torch.stack(out.logits)
    best_TB2 = logp_TBV.topk(2, -1).values
    ends = set(model.config.eos_token_id or ())
    found = []
    for row, tokens in enumerate(out.sequences[:, longest:].tolist()):
        stop = next((t + 1 for t, token in enumerate(tokens) if token in ends), len(tokens))
        logprobs = [logp_TBV[t, row, token].item() for t, token in enumerate(tokens[:stop])]
        found.append(Said(tokens[:stop], logprobs, (best_TB2[:stop, row, 0] - best_TB2[:stop, row, 1]).tolist()))
    return found


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process, taken apart afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": CONTEXT, "max_num_seqs": 64, **options}
    llm = LLM(str(folder), **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def routed_engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine on a composition's base, its adapters and its router."""
    from tessellm.checkpoint import read_config
    from tessellm.vllm.adapters import engine_options
    from tessellm.vllm.config import member_sources

    config = read_config(folder)
    own = engine_options(config, folder, member_sources(config, folder))
    with engine(own.pop("model"), **{**own, **options}) as llm:
        yield llm


def vllm_routes(llm: Any, members: Sequence[str], asked: Sequence[Sequence[int]]) -> list[Any]:
    from tessellm.vllm.decision import read_route, route_params

    rows: Any = [{"prompt_token_ids": list(row)} for row in asked]
    return [read_route(output, members) for output in llm.generate(rows, route_params(len(members)), use_tqdm=False)]


def assert_same_routes(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """The same member for every prompt, but where two are as likely as each other; the same priors."""
    for one, two in zip(ours, theirs, strict=True):
        for name, share in one.prior.items():
            assert abs(share - two.prior.get(name, 0.0)) < 1e-4, (one, two)
        if one.selected != two.selected:
            assert abs(one.prior[one.selected] - one.prior[two.selected]) < 1e-4, (one, two)


@contextmanager
def server(folder: Path, log: Path, options: Sequence[str], key: str = "secret") -> Iterator[openai.OpenAI]:
    """`tessellm serve --engine vllm` in a process of its own, and a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tessellm.cli", "serve", "--engine", "vllm", str(folder), "--port", str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--api-key", key, "--", *options],
            stdout=stream, stderr=stream, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )  # fmt: skip
        try:
            api = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)
            _wait_for(api, process, log)
            yield api
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _wait_for(api: openai.OpenAI, process: subprocess.Popen, log: Path) -> None:
    for _ in range(800):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            api.models.list()
            return
        except openai.APIConnectionError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def vllm_says(llm: Any, asked: Sequence[Sequence[int]], new: int = NEW, **sampling: Any) -> list[Said]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new, logprobs=1, **sampling)
    outputs = llm.generate([{"prompt_token_ids": list(row)} for row in asked], parameters, use_tqdm=False)
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        found.append(Said(tokens, logprobs, []))
    return found


def assert_same(ours: Sequence[Said], theirs: Sequence[Said], least: int = 50) -> None:
    """The same tokens, and log-probabilities within 1e-4, in every sequence but those that part at a tie; at least
    `least` sequences have no tie."""
    whole = 0
    for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        parted = next(
            (t for t, pair in enumerate(zip(one.tokens, two.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        if parted is None:
            assert len(one.tokens) == len(two.tokens), f"sequence {number} stops elsewhere: {one.tokens} {two.tokens}"
            whole += 1
        else:
            gap = (one.gap or two.gap)[parted]
            assert gap < TIE, f"sequence {number} parts at token {parted}, where the two best are {gap} apart"
        upto = slice(parted)
        for left, right in zip(one.logprobs[upto], two.logprobs[upto], strict=False):
            assert abs(left - right) < 1e-4, f"sequence {number}: {left} and {right}"
    assert whole >= least, f"only {whole} of {len(ours)} sequences without a tie"
