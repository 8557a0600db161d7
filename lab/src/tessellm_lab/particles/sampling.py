"""Sequence-exact composition by sequential Monte Carlo: samples from C, not from Eq. 2 step by step.

Eq. 2 normalises at every token; C[p_1, …](x) ∝ p_b(x) Π_i (p_i(x)/p_b(x))^w_i normalises once, over whole sequences.
With Eq. 2 as the proposal, the importance weight of a sequence for C is exactly Π_t Z_t. N particles are extended
together; their weights are multiplied by Z_t at each token; when the effective sample size falls below a share of N
they are resampled, systematically. As N grows the weighted particles converge to C, and exp(log_z) estimates Z without
bias.

    B prompts   N particles a prompt   R = B·N rows   V vocabulary   S new tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tessellm.errors import GenerationError
from tessellm.model.composed import ComposedForCausalLM
from tessellm.rules import product_scores


@dataclass(frozen=True)
class Particles:
    """Weighted samples of whole sequences, and how the sampling went.

    Over the sequences of up to S new tokens that end at their end token, C is Σ_n exp(log_weights[n]) δ(sequences[n]).
    """

    sequences: Tensor  # [B, N, prompt + S], padded after the end token
    log_weights: Tensor  # [B, N], normalised over N
    log_z: Tensor  # [B], the log of an unbiased estimate of Z
    effective_sizes: Tensor  # [B, S], before resampling
    resampled: Tensor  # [B, S], whether it was
    prompt_length: int

    @property
    def continuations(self) -> Tensor:
        return self.sequences[:, :, self.prompt_length :]

    def draw(self, count: int = 1, seed: int | None = None) -> Tensor:
        """Unweighted sequences, [B, count, prompt + S]: particles picked by their weights."""
        generator = None if seed is None else torch.Generator(self.log_weights.device).manual_seed(seed)
        index_BC = torch.multinomial(self.log_weights.exp(), count, replacement=True, generator=generator)
        return self.sequences.gather(1, index_BC.unsqueeze(-1).expand(-1, -1, self.sequences.shape[-1]))


class EndTokens(NamedTuple):
    """What ends a text and what fills up the rows of those that have ended; None: as the model says."""

    end: int | list[int] | None = None
    padding: int | None = None


@torch.no_grad()
def sample(
    model: ComposedForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    particles: int = 64,
    max_new_tokens: int = 64,
    seed: int | None = None,
    resample_below: float = 0.5,
    tokens: EndTokens = EndTokens(),  # noqa: B008
) -> Particles:
    """Sample N weighted continuations of every prompt from C, the members' sequence-level composition.

    The rule must be `product`; its weights count. Prompts of several lengths are padded on the left, with an attention
    mask. The temperature is 1: C says what to sample, and nothing may bend it. Sequences are those of at most
    `max_new_tokens` tokens; a longer one counts as its beginning. `log_z` is −inf where the members contradict each
    other on every particle.
    """
    _check(model, input_ids, particles, max_new_tokens, resample_below)
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    ends_E = _end_tokens(model, tokens.end, input_ids)
    cloud = _Cloud(model, input_ids, attention_mask, particles, ends_E, tokens.padding)
    sizes, resampled = [], []
    for _ in range(max_new_tokens):
        cloud.extend(generator)
        size_B = effective_size(cloud.log_weight_BN)
        chosen_B = size_B < resample_below * particles
        if bool(chosen_B.any()):
            cloud.resample(chosen_B, generator)
        sizes.append(size_B)
        resampled.append(chosen_B)
        if bool(cloud.finished_R.all()):
            break
    log_total_B1 = cloud.log_weight_BN.logsumexp(-1, keepdim=True)
    return Particles(
        sequences=cloud.ids_RT.view(len(input_ids), particles, -1),
        log_weights=cloud.log_weight_BN - log_total_B1.clamp_min(torch.finfo(torch.float64).min),
        log_z=cloud.log_z_B + log_mean(cloud.log_weight_BN),
        effective_sizes=torch.stack(sizes, dim=1),
        resampled=torch.stack(resampled, dim=1),
        prompt_length=input_ids.shape[1],
    )


class _Cloud:
    """All particles of all prompts: their tokens, weights and caches."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        input_ids: Tensor,
        mask: Tensor | None,
        particles: int,
        ends_E: Tensor,
        pad: int | None,
    ):
        self.model, self.ends_E, self.shape = model, ends_E, (len(input_ids), particles)
        self.weights = model.rule.weights
        pad = pad if pad is not None else model.config.pad_token_id
        self.pad = pad if pad is not None else int(ends_E[0]) if len(ends_E) else 0
        mask = torch.ones_like(input_ids) if mask is None else mask
        self.cache = model.new_cache()
        rows = self._forward(input_ids, mask)  # every prompt is read once, then copied
        self.cache.batch_repeat_interleave(particles)
        self.logp_MRV, self.composed_RV = (row.repeat_interleave(particles, dim=-2) for row in rows)
        self.ids_RT, self.mask_RT = (tensor.repeat_interleave(particles, dim=0) for tensor in (input_ids, mask))
        self.finished_R = torch.zeros(len(self.ids_RT), dtype=torch.bool, device=input_ids.device)
        self.log_weight_BN = torch.zeros(self.shape, dtype=torch.float64, device=input_ids.device)
        self.log_z_B = torch.zeros(len(input_ids), dtype=torch.float64, device=input_ids.device)
        self.stale = False

    def _forward(self, fed_RT: Tensor, mask_RT: Tensor) -> tuple[Tensor, Tensor]:
        """The members' and the composed law of the next token: [M, R, V] and [R, V]."""
        output = self.model(
            fed_RT,
            attention_mask=mask_RT,
            position_ids=_positions(mask_RT, fed_RT.shape[1]),
            past_key_values=self.cache,
            logits_to_keep=1,
            output_member_logprobs=True,
        )
        return output.member_logprobs[:, :, -1].double(), output.logits[:, -1].double()

    def extend(self, generator: torch.Generator | None) -> None:
        """One token by Eq. 2 for every particle that has not ended; weights times Z_t."""
        if self.stale:
            self.logp_MRV, self.composed_RV = self._forward(self.ids_RT[:, -1:], self.mask_RT)
        score_RV = product_scores(self.logp_MRV, self.weights)
        token_R = _sample_tokens(score_RV, self.composed_RV, generator).masked_fill(self.finished_R, self.pad)
        log_z_R = score_RV.logsumexp(-1).masked_fill(self.finished_R, 0.0)
        self.log_weight_BN = self.log_weight_BN + log_z_R.view(self.shape)
        self.ids_RT = torch.cat([self.ids_RT, token_R.unsqueeze(-1)], dim=1)
        self.mask_RT = torch.cat([self.mask_RT, torch.ones_like(self.mask_RT[:, :1])], dim=1)
        self.finished_R = self.finished_R | torch.isin(token_R, self.ends_E)
        self.stale = True

    def resample(self, chosen_B: Tensor, generator: torch.Generator | None) -> None:
        """Survivors in place of weights, for the prompts chosen; their mean weight goes into the estimate of Z."""
        batch, particles = self.shape
        alive_B1 = (chosen_B & (self.log_weight_BN.amax(-1) > -torch.inf)).unsqueeze(-1)
        own_BN = torch.arange(particles, device=chosen_B.device).expand(batch, -1)
        survivor_BN = torch.where(alive_B1, systematic(self.log_weight_BN.nan_to_num(), generator), own_BN)
        index_R = (survivor_BN + particles * torch.arange(batch, device=chosen_B.device).unsqueeze(-1)).flatten()
        self.ids_RT, self.mask_RT = self.ids_RT[index_R], self.mask_RT[index_R]
        self.finished_R = self.finished_R[index_R]
        self.cache.reorder_cache(index_R)  # type: ignore[arg-type]
        self.log_z_B = torch.where(alive_B1[:, 0], self.log_z_B + log_mean(self.log_weight_BN), self.log_z_B)
        self.log_weight_BN = self.log_weight_BN.masked_fill(alive_B1, 0.0)


def effective_size(log_weight_BN: Tensor) -> Tensor:
    """(Σ w)² / Σ w²: how many equal weights would be worth as much."""
    return (2 * log_weight_BN.logsumexp(-1) - (2 * log_weight_BN).logsumexp(-1)).exp().nan_to_num(0.0)


def log_mean(log_weight_BN: Tensor) -> Tensor:
    return log_weight_BN.logsumexp(-1) - math.log(log_weight_BN.shape[-1])


def systematic(log_weight_BN: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Indices of N survivors: one uniform number a prompt, N evenly spaced pointers into the cumulated weights.

    A particle of normalised weight w survives ⌊Nw⌋ or ⌈Nw⌉ times, N·w on average.
    """
    cumulated_BN = log_weight_BN.softmax(-1).cumsum(-1)
    cumulated_BN = cumulated_BN / cumulated_BN[:, -1:]
    batch, count = log_weight_BN.shape
    start_B1 = torch.rand(batch, 1, generator=generator, dtype=torch.float64, device=log_weight_BN.device)
    pointer_BN = (start_B1 + torch.arange(count, device=start_B1.device)) / count
    return torch.searchsorted(cumulated_BN, pointer_BN, right=True).clamp_max(count - 1)


def _sample_tokens(score_RV: Tensor, fallback_RV: Tensor, generator: torch.Generator | None) -> Tensor:
    """Tokens by Eq. 2. Where the members allow nothing together, Z_t = 0: any token will do, its weight is zero."""
    impossible_R1 = (score_RV == -torch.inf).all(-1, keepdim=True)
    p_RV = torch.where(impossible_R1, fallback_RV, score_RV).softmax(-1)
    return torch.multinomial(p_RV, 1, generator=generator).squeeze(-1)


def _positions(mask_RT: Tensor, steps: int) -> Tensor:
    """Real tokens count from 0, whatever padding stands before them."""
    return (mask_RT.long().cumsum(-1) - 1).clamp_min(0)[:, -steps:]


def _end_tokens(model: ComposedForCausalLM, given: int | list[int] | None, like: Tensor) -> Tensor:
    ends = given if given is not None else model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return torch.tensor(ends, dtype=torch.long, device=like.device)


def _check(model: ComposedForCausalLM, input_ids: Tensor, particles: int, steps: int, below: float) -> None:
    if model.rule.name != "product":
        raise GenerationError(
            f"particles sample from the product of the members; this model's rule is {model.rule.name!r}. "
            'Use model.set_rule("product"), or leave particles out and decode by the rule'
        )
    if particles < 1 or steps < 1 or not 0 <= below <= 1:
        raise GenerationError(
            f"expected particles ≥ 1, max_new_tokens ≥ 1 and 0 ≤ resample_below ≤ 1; got {particles}, {steps}, {below}"
        )
    model.config.check_room(input_ids.shape[1], steps)
