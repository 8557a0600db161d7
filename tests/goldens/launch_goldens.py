"""Steps whose launches are recorded: prefill, decode and verification by the fused kernels, for `product`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import tessellm

from conftest import build_model, perturbed, save_lora, save_member
from decoding_cases import prompts
from engine_access import fused_engine, recorded, with_deltas

TINY = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 80, "num_hidden_layers": 1}
GEMMA = {  # the shapes of google/gemma-2-2b, which was measured, but for its vocabulary; one layer
    "hidden_size": 2304, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {  # those of a Llama of 1 billion parameters
    "hidden_size": 2048, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


class Scenario(NamedTuple):
    """Members, and what runs over them."""

    members: str  # architecture, then full or lora
    sizes: dict[str, Any]
    executed: bool = False  # False: launches are noted, kernels do not run
    graphs: bool = False  # captured steps, of which each capture launches several times: distinct launches are kept
    lookup: bool = False
    slots: int = 8
    context: int = 512


SCENARIOS = {
    "tiny adapters, executed, drafts": Scenario("llama lora", TINY, True, lookup=True, slots=2, context=64),
    "tiny llama": Scenario("llama full", TINY, context=120),
    "gemma-2-2b full": Scenario("gemma2 full", GEMMA),
    "gemma-2-2b adapters": Scenario("gemma2 lora", GEMMA),
    "gemma-2-2b adapters, drafts": Scenario("gemma2 lora", GEMMA, lookup=True),
    "gemma-2-2b full, graphs": Scenario("gemma2 full", GEMMA, graphs=True),
    "gemma-2-2b adapters, graphs": Scenario("gemma2 lora", GEMMA, graphs=True),
    "gemma-2-2b adapters, graphs, drafts": Scenario("gemma2 lora", GEMMA, graphs=True, lookup=True),
    "llama-1b full, drafts": Scenario("llama full", LLAMA, lookup=True),
    "llama-1b adapters, graphs": Scenario("llama lora", LLAMA, graphs=True, context=4096),
}


def launches(scenario: Scenario, folder: Path) -> list[str]:
    """Return the launches of a scenario, in order; of captured steps, the distinct ones, sorted."""
    model = _tiny(scenario, folder) if scenario.sizes is TINY else _large(scenario)
    options = {"slots": scenario.slots, "context": scenario.context, "lookup": scenario.lookup}
    count, longest, chunk = (3, 20, 8) if scenario.executed else (11, min(300, scenario.context - 40), 64)
    given = prompts(count, longest, seed=4)
    if scenario.lookup:
        given = [(prompt[:9] * 40)[: len(prompt)] for prompt in given]
    asked = [{"max_new_tokens": 5 + n % 3, "ignore_end": True} for n in range(count)]
    engine = fused_engine(model, **options, graphs=scenario.graphs, checked=scenario.executed)
    with engine as write, recorded(execute=scenario.executed) as found:
        write(given, asked, chunk)
    return sorted(set(found)) if scenario.graphs else found


def _tiny(scenario: Scenario, folder: Path) -> Any:
    base = build_model("llama", **scenario.sizes)
    if scenario.members == "llama full":
        return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
    home = save_member(base, folder / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    some = {"a": ["q_proj", "up_proj"], "b": targets}
    paths = {name: str(save_lora(home, folder / name, 3, target_modules=t)) for name, t in some.items()}
    return tessellm.compose(str(home), paths, rule="product")


def _large(scenario: Scenario) -> Any:
    """Compose members of zeros in half precision: nothing is computed with them but the first forward."""
    kind, members = scenario.members.split()
    settings = {**scenario.sizes, **({"attn_implementation": "eager"} if kind == "gemma2" else {})}

    def zeros() -> Any:
        with torch.device("meta"):
            model = build_model(kind, **settings).bfloat16()
        model = model.to_empty(device="cpu")
        model.tie_weights()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        return model

    base = zeros()
    experts = {name: with_deltas(base, 8) if members == "lora" else zeros() for name in "ab"}
    return tessellm.compose(base, experts, rule="product")
