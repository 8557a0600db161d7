"""A composition as one vLLM model: members, vocabulary, rule. Held to `tessellm.model`, the slow reference.

All members read the same tokens at the same positions; each attention layer keeps a paged cache of its own. The hidden
states of all members, side by side, are what vLLM carries from `forward` to `compute_logits`, where they become the
members' log-probabilities and the rule combines those.

Shapes: M members (0 is the base), N rows, V composed vocabulary, H hidden sizes of all members together.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import read_own_tensors, saved_alignment
from ..checkpoint.reader import ROUTER
from ..members import Loading, load_tokenizer
from ..members.sources import weight_files
from ..model.transcript import Routing
from ..routing import ChatMarks
from ..rules import working_dtype
from .config import composition_folder, has_router, logger, make_rule, member_configs, member_sources
from .lora import Adapter, read_adapter
from .members import InnerMember, merged_checkpoint, run_members
from .memory import Memory
from .state import States
from .tap import Tap, stored_router


class ServedComposition(nn.Module):
    """What vLLM loads where a config names this architecture."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.dtype = vllm_config.model_config.dtype
        self.most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        folder = composition_folder(self.config.folder)
        self.places = member_sources(self.config, folder)
        self.rule = make_rule(self.config)
        tensors, names = read_own_tensors(folder), self.config.member_names
        self.alignments = {name: saved_alignment(tensors, name, self.config.vocab_size) for name in names}
        configs = member_configs(self.config, self.places)
        base = InnerMember(vllm_config, configs["base"], "base")
        base.adopt(self._plain_adapters())
        own = [name for name in names if name not in base.names]
        self.inner = nn.ModuleDict(
            {"base": base} | {name: InnerMember(vllm_config, configs[name], name) for name in own}
        )
        order = [name for member in self.members for name in member.names]
        self.order_M = [order.index(name) for name in names]  # adapters run with the base, before full experts
        self.memory: Memory | None = None
        self.states: States | None = None
        self.tap: Tap | None = None
        if self.rule.routed is not None:
            tokenizer = load_tokenizer(folder, Loading())
            router = None
            if has_router(self.config, folder):
                router = stored_router(folder / ROUTER, self.places["base"], configs["base"], tokenizer)
                self.tap = Tap(router)
            routing = Routing(self.rule.routed, names, router, ChatMarks.of(tokenizer))
            self.memory = Memory(vllm_config, sum(self.sizes), self.tap.experts if self.tap else 0)
            row_elements = len(names) * self.config.vocab_size
            self.states = States(routing, self.memory, row_elements, self.member_logprobs)
        self.output_TH = torch.zeros(self.most_tokens, sum(self.sizes), dtype=self.dtype)

    @property
    def members(self) -> list[Any]:
        return list(self.inner.values())

    @property
    def sizes(self) -> list[int]:
        return [member.hidden_size for member in self.members for _ in member.names]

    def _plain_adapters(self) -> list[Adapter]:
        """Adapters that change nothing of the base's own tensors."""
        names = [entry["name"] for entry in self.config.members if entry["kind"] == "adapter"]
        found = [read_adapter(self.places[name], name) for name in names]
        return [adapter for adapter in found if adapter is not None]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The base's embeddings; vLLM asks every language model for this."""
        embedded: Tensor = self.members[0].model.embed_input_ids(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The hidden states of all members, side by side: [tokens, H]."""
        output_TH = self.output_TH[: len(input_ids)]
        if self.tap is not None:
            self.tap.reset()
        run_members(self.members, lambda name: self.alignments[name].to_member(input_ids), positions, output_TH)
        if self.memory is not None:
            self.memory(output_TH, input_ids, None if self.tap is None else self.tap.take(len(input_ids)))
        return output_TH

    def member_logprobs(self, hidden_NH: Tensor) -> Tensor | None:
        """logp_MNV over the composed vocabulary; None on ranks that do not gather logits."""
        parts = iter(hidden_NH.split(self.sizes, -1))
        rows: list[Tensor] = []
        for member in self.members:
            logits_M = member.logits([next(parts) for _ in member.names])
            if logits_M is None:
                continue
            for name, logits_NS in zip(member.names, logits_M, strict=True):
                logits_NV = self.alignments[name].to_composed(logits_NS)
                rows.append(logits_NV.to(working_dtype(logits_NV)).log_softmax(-1))
        return torch.stack([rows[at] for at in self.order_M]) if rows else None

    def compute_logits(self, hidden_NH: Tensor) -> Tensor | None:
        """The composed log-probabilities of every row: [N, V]."""
        step = self.memory.step if self.memory is not None else None
        if self.states is not None and step is not None:
            first = self._place_in_batch(hidden_NH)
            if first is not None:
                return self.states.rows(step, first, hidden_NH)
            if len(hidden_NH) <= len(step.length_B):
                return self.states.last_rows(step, hidden_NH)
        logp_MNV = self.member_logprobs(hidden_NH)
        if logp_MNV is None:
            return None
        tokens_N1 = torch.zeros(len(hidden_NH), 1, dtype=torch.long, device=hidden_NH.device)
        logp_N1V, _ = self.rule(logp_MNV[:, :, None], tokens_N1, torch.ones_like(tokens_N1, dtype=torch.bool), None)
        return logp_N1V[:, 0]

    def _place_in_batch(self, hidden_NH: Tensor) -> int | None:
        """Which token of the batch the rows start at, where vLLM asks about a stretch of it (for the log-probabilities
        of prompts): that is a view of what `forward` gave. Rows to sample from are picked, and so are a copy."""
        output_TH = self.output_TH
        if hidden_NH.untyped_storage().data_ptr() != output_TH.untyped_storage().data_ptr():
            return None
        return (hidden_NH.storage_offset() - output_TH.storage_offset()) // output_TH.shape[1]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load every member from its own folder. The composition's own tensors were read when it was made."""
        loaded = set()
        for member in self.members:
            name, place = member.names[0], self.places[member.names[0]]
            if place.is_adapter:
                logger.warning(
                    "%s: the adapter is more than LoRA of linear layers, so it was merged into a full model", name
                )
                with merged_checkpoint(self.places, name, self.dtype) as folder:
                    done = member.load(weight_files(Path(folder)))
            else:
                done = member.load(weight_files(place.directory))
            loaded |= {f"inner.{name}.{each}" for each in done}
        if self.tap is not None:
            base = self.members[0]
            self.tap.attach(base.model, self.most_tokens, next(self.parameters()).device, len(base.names))
        return loaded
