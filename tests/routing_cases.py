"""A router that is made by hand, and what a routed mixture should write: slow, from the members' log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tessellm.engine.requests import Request
from tessellm.routing import BASE, Route, RoutedPrompt
from tessellm.rules.components import component_logp, mix, update

MARGIN = 1e-4  # between the best token and another, below which either may be written


class IdEnergies:
    """Energies that are functions of token ids: [tokens, experts]."""

    def __init__(self, experts: int):
        self.experts = experts
        self.read: list[Tensor] = []

    def note(self, module: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        ids_BT = named["input_ids"]
        scale_K = torch.arange(1, self.experts + 1)
        self.read.append(((ids_BT[..., None] * scale_K) % 8).float())

    def take(self) -> Tensor:
        found, self.read = torch.cat(self.read, 1), []
        return found


class HandRouter:
    """Routes by the sum of a prompt's energies: to the base, to one expert, or to several members in doubt."""

    def __init__(self, experts: Sequence[str]):
        self.experts = list(experts)
        self.routed: list[list[int]] = []

    @contextmanager
    def tap(self, base: nn.Module) -> Iterator[IdEnergies]:
        energies = IdEnergies(len(self.experts))
        handle = base.register_forward_pre_hook(energies.note, with_kwargs=True)
        try:
            yield energies
        finally:
            handle.remove()

    def route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        for prompt in prompts:
            assert len(prompt.energy_TK) == len(prompt.ids)
            self.routed.append(list(prompt.ids))
        return [self.decide(prompt.energy_TK[prompt.user]) for prompt in prompts]

    def decide(self, energy_TK: Tensor) -> Route:
        total = int(energy_TK[..., 0].sum())
        names = [BASE, *self.experts]
        lead = names[total % len(names)]
        share = 0.8 if total % 3 else 0.4
        prior = {name: share if name == lead else (1 - share) / (len(names) - 1) for name in names}
        return Route(prior, lead)


def routed(model: Any, experts: Sequence[str] | None = None) -> Any:
    """Give a composition by `mixture` a router."""
    model.router = HandRouter(list(model.members)[1:] if experts is None else experts)
    return model


def route_of(model: Any, prompt: Sequence[int]) -> Route:
    ids = torch.tensor(list(prompt))
    energies = IdEnergies(len(model.router.experts))
    energies.note(nn.Identity(), (), {"input_ids": ids[None]})
    return model.router.decide(energies.take()[0])


@torch.no_grad()
def mixture_rows(model: Any, request: Request, route: Route | None) -> Tensor:
    """Return log p̂ behind every token that the request wrote, along its own text: [T, V]."""
    text = torch.tensor([request.prompt + request.tokens])
    logp_MTV = model(text, use_cache=False, output_member_logprobs=True).member_logprobs[:, 0]
    rule, experts = model.rule.rule, len(model.members) - 1
    names = [BASE, *(list(model.members)[n] for n in rule.candidates(experts))]
    if request.experts is not None:
        weights_CK = torch.tensor([[request.experts.get(name, 0.0) for name in list(model.members)[1:]]])
        prior_1C = torch.ones(1, 1)
    elif route is None:
        weights_CK, prior_1C = rule.component_weights(experts), rule.unrouted_prior(experts)[None]
    else:
        active = route.active(rule.alone, rule.most)
        share_1N = torch.tensor([[route.prior[name] if name in active else 0.0 for name in names]])
        prior_1C = rule.component_prior(share_1N / share_1N.sum())
        numbers = [n for n in rule.candidates(experts) if list(model.members)[n] in active]
        weights_CK = rule.component_weights(experts, numbers)
    log_pi_1C, rows = prior_1C.log(), []
    for t, token in enumerate(request.tokens):
        logp_M1V = logp_MTV[:, len(request.prompt) - 1 + t][:, None]
        rows.append(mix(logp_M1V, weights_CK, log_pi_1C)[0])
        loglik_1C = component_logp(logp_M1V, weights_CK)[:, 0, token][None]
        log_pi_1C = update(log_pi_1C, loglik_1C, prior_1C, rule.switch_prob)
    return torch.stack(rows)


def wrong_places(model: Any, request: Request, route: Route | None, margin: float = MARGIN) -> list[int]:
    """Return where a greedy request wrote another token than the reference's best, by more than a near-tie, or with
    another log-probability."""
    rows_TV = mixture_rows(model, request, route)
    chosen_T = rows_TV.gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
    apart_T = (chosen_T - torch.tensor(request.logprobs)).abs()
    return [
        t
        for t, (gap, off) in enumerate(zip(rows_TV.amax(-1) - chosen_T, apart_T, strict=True))
        if gap > margin or off > margin
    ]
