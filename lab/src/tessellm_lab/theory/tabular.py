"""An exact law as a causal language model: a table looked up by the prefix, with a real cache.

Puts enumerable laws through everything that is made for language models: `tessellm.compose`, `generate`, particles.
Tokens are 0 … V−1; the edge token V is the prompt that starts a sequence, and ends it after n tokens.

    V vocabulary without the edge   n length   B batch   T tokens fed   P a prefix's axes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .sequences import check_joint, conditionals


class TabularConfig(PreTrainedConfig):
    model_type = "tessellm-tabular"

    vocab_size: int = 3
    max_position_embeddings: int = 3
    num_hidden_layers: int = 1


class TabularForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model whose continuations of the edge token follow `logp`, shape [V]*n."""

    config_class = TabularConfig

    def __init__(self, config: TabularConfig, logp: Tensor):
        super().__init__(config)
        self.size, self.length = logp.shape[0], logp.ndim
        for t, row_PV in enumerate(conditionals(check_joint(logp))):
            ended = torch.full((*row_PV.shape[:-1], 1), -torch.inf, dtype=torch.float64)
            self.register_buffer(f"row_{t}", torch.cat([row_PV, ended], dim=-1).reshape(-1, self.size + 1))
        self.anchor = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)  # gives device and dtype

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values if past_key_values is not None else DynamicCache(config=self.config)
        fed_BT = input_ids.to(torch.float64)[:, None, :, None]
        seen_BT = cache.update(fed_BT, fed_BT, 0)[0][:, 0, :, 0].long()
        steps = range(seen_BT.shape[1] - input_ids.shape[1], seen_BT.shape[1])
        rows = torch.stack([self._row(seen_BT[:, 1 : t + 1]) for t in steps], dim=1)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)
        return CausalLMOutputWithPast(logits=rows[:, kept], past_key_values=cache)  # type: ignore[arg-type]

    def _row(self, prefix_BT: Tensor) -> Tensor:
        """Log-probabilities of the next token, the edge last."""
        ended_V = torch.full((self.size + 1,), -torch.inf, dtype=torch.float64)
        ended_V[-1] = 0.0
        over_B = (prefix_BT == self.size).any(1)
        if prefix_BT.shape[1] >= self.length:
            return ended_V.expand(len(prefix_BT), -1)
        number_B = torch.zeros(len(prefix_BT), dtype=torch.long)
        for token_B in prefix_BT.unbind(1):
            number_B = number_B * self.size + token_B.clamp_max(self.size - 1)
        return torch.where(over_B.unsqueeze(-1), ended_V, getattr(self, f"row_{prefix_BT.shape[1]}")[number_B])


def language_model(logp: Tensor) -> TabularForCausalLM:
    """The law as a model. All positions must have one vocabulary."""
    if len(set(logp.shape)) != 1:
        raise ValueError(f"expected the same vocabulary at every position; got sizes {tuple(logp.shape)}")
    edge = logp.shape[0]
    ids: dict[str, Any] = {"bos_token_id": edge, "eos_token_id": edge, "pad_token_id": edge}
    config = TabularConfig(vocab_size=edge + 1, max_position_embeddings=logp.ndim + 2, **ids)
    return TabularForCausalLM(config, logp).eval()
