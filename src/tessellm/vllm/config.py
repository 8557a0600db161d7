"""What vLLM must know of a composition before it starts, and what of vLLM a composition cannot use.

Runs in the process that the user started, before any worker is: whatever is wrong is said there, at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from .. import model as reference
from ..checkpoint import read_own_tensors, saved_alignment, saved_members, saved_spec
from ..checkpoint.reader import ROUTER
from ..compose import rule_entry
from ..errors import MemberError, RecipeError, VocabularyError
from ..members import Loading
from ..members.sources import Source, check_files, find
from ..rules import ComposedRule, Mixture, Product
from .versions import check_version

logger = logging.getLogger("vllm.tessellm")
RULES = (Product.name, Mixture.name)


class SizedConfig(reference.ComposedConfig):
    """A composition's config with the sizes that vLLM asks of a model: sums over the members, or the least."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        place = kwargs.get("name_or_path") or config_dict.get("_name_or_path", "")
        folder = composition_folder(place, kwargs.get("revision"))
        returned = super().from_dict(config_dict, **kwargs)
        config = returned[0] if isinstance(returned, tuple) else returned
        set_sizes(config, folder)
        return returned


# what AutoModelForCausalLM.register does, but for its check that the config is called as the model says
AutoModelForCausalLM._model_mapping.register(SizedConfig, reference.ComposedForCausalLM, exist_ok=True)  # type: ignore[arg-type]


def composition_folder(place: str | Path, revision: str | None = None) -> Path:
    """The composition's folder on this machine."""
    if Path(place).is_dir():
        return Path(place).resolve()
    return find(place, "the composition", revision, nested=True).directory


def set_sizes(config: reference.ComposedConfig, folder: Path) -> None:
    """Look at every member, refuse what cannot be served, and note the sizes."""
    import vllm

    warning = check_version(vllm.__version__)
    if warning:
        logger.warning(warning)
    places = member_sources(config, folder)
    configs = member_configs(config, places)
    check_vocabulary(config, configs, folder)
    check_heads(configs)
    if make_rule(config).routed is not None and not has_router(config, folder) and config.routing.get("enabled", True):
        logger.warning(
            "%s holds no %s, so all prompts have one prior. Where that is not meant, compose again", folder, ROUTER
        )
    texts = [member.get_text_config(decoder=True) for member in configs.values()]
    heads = [text.num_attention_heads for text in texts]
    config.folder = str(folder)
    config.hidden_size = sum(text.hidden_size for text in texts)
    config.num_hidden_layers = sum(text.num_hidden_layers for text in texts)
    config.num_attention_heads = math.gcd(*heads)
    config.num_key_value_heads = min(
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads for text in texts
    )
    config.head_dim = max(map(head_size, texts))


def head_size(text: PreTrainedConfig) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def check_heads(configs: Mapping[str, PreTrainedConfig]) -> None:
    """vLLM's CPU build starts with any width of a head, and ends at the first request if its kernels lack that one."""
    from .versions import current_platform

    if not current_platform.is_cpu():
        return
    from .versions import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    for name, member in configs.items():
        text = member.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None) is None and head_size(text) not in known:
            raise MemberError(
                f"member {name!r}: its attention heads are {head_size(text)} wide, and vLLM's CPU build has kernels for"
                f" {', '.join(map(str, known))} only. Serve it by tessellm's own engine: leave out --engine vllm"
            )


def member_sources(config: reference.ComposedConfig, folder: Path) -> dict[str, Source]:
    """Where every member's files are, after a look at each; missing, changed and damaged ones are refused."""
    places = {}
    for saved in saved_members(config, folder):
        name = saved.name
        spec = saved_spec(saved, folder, Loading())
        if spec.quantization is not None:
            raise MemberError(
                f"member {name!r} was composed with quantization {spec.quantization}, which transformers applies when "
                "it loads; vLLM does not. Compose it without, or serve with --quantization fp8"
            )
        places[name] = find(str(spec.source), f"member {name!r}", spec.revision)
        if places[name].file is not None:
            raise MemberError(
                f"member {name!r} is a GGUF file, which the vLLM plugin does not read inside a composition. Compose it "
                "with --self-contained, which writes its weights as safetensors, and serve that"
            )
        check_files(places[name].directory, f"member {name!r}")
    return places


def member_configs(config: reference.ComposedConfig, places: Mapping[str, Source]) -> dict[str, PreTrainedConfig]:
    """Every member's own config; an adapter's is its base's."""
    from .versions import ModelRegistry

    known, configs = set(ModelRegistry.get_supported_archs()), {}
    for entry in config.members:
        name = entry["name"]
        owner = "base" if places[name].is_adapter else name
        member = AutoConfig.from_pretrained(places[owner].directory)
        names = list(member.architectures or [])
        if not known.intersection(names):
            raise MemberError(f"member {name!r}: vLLM has no model of architecture {', '.join(names) or 'unknown'}")
        if getattr(member, "quantization_config", None) is not None:
            raise MemberError(
                f"member {name!r}: {places[owner].directory} holds quantized weights, which the vLLM plugin does not "
                "read inside a composition. Use a checkpoint in bfloat16 or float16"
            )
        configs[name] = member
    return configs


def check_vocabulary(config: reference.ComposedConfig, configs: Mapping[str, PreTrainedConfig], folder: Path) -> None:
    """Every composed id must have a row at every member; the maps were made when the members were composed."""
    tensors = read_own_tensors(folder)
    for name, member in configs.items():
        rows = member.get_text_config(decoder=True).vocab_size
        id_V = saved_alignment(tensors, name, config.vocab_size).member_id_V
        needed = config.vocab_size if id_V is None else int(id_V.max()) + 1
        if rows < needed:
            raise VocabularyError(
                f"member {name!r} has {rows} token rows, but the composition was made with at least {needed}: the "
                "member or its config.json was exchanged. Compose again"
            )


def make_rule(config: reference.ComposedConfig) -> ComposedRule:
    """The rule as it runs, or a refusal that says what can be served."""
    name = config.rule["name"]
    if name not in RULES:
        raise RecipeError(
            f"the rule {name!r} cannot be served by vLLM, which runs {' and '.join(RULES)}. Leave out --engine vllm, "
            f"or compose with rule: {Product.name}"
        )
    rule_entry(config.rule)
    return ComposedRule.make(config.rule, config.weights)


def has_router(config: reference.ComposedConfig, folder: Path) -> bool:
    """Whether the composition's prior comes from a router."""
    return make_rule(config).routed is not None and (folder / ROUTER).is_file()


class EngineLimits:
    """What vLLM is asked for with a composition, checked when all of its options are known."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        if model_config.enable_prompt_embeds:
            raise RecipeError(
                "a composition reads token ids: its members have embeddings of their own. "
                "Leave out --enable-prompt-embeds"
            )

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise RecipeError(
                "a composition cannot be drafted for in vLLM: speculative decoding there verifies one model's hidden "
                "states. Leave out --speculative-config"
            )
        if vllm_config.lora_config is not None:
            raise RecipeError(
                "vLLM's own LoRA requests address one model, and a composition is several. Leave out --enable-lora, "
                "and compose the adapter as an expert"
            )
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise RecipeError("a composition cannot use --decode-context-parallel-size; use tensor parallelism")
        config = vllm_config.model_config.hf_config
        rule = make_rule(config)
        if rule.routed is not None and vllm_config.kv_transfer_config is not None:
            raise RecipeError(
                f"the rule {rule.name!r} has state, which is not sent along with a cache. Leave out "
                f"--kv-transfer-config, or compose with rule: {Product.name}"
            )
        scheduler = vllm_config.scheduler_config
        if scheduler.disable_hybrid_kv_cache_manager is None:
            scheduler.disable_hybrid_kv_cache_manager = True  # members' caches differ in shape
