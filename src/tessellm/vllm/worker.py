"""vLLM's worker on a base whose adapters are chosen by the stored router.

A request that is to be routed is read by the base, without an adapter, and asks for one token. In place of the base's
log-probabilities it is given those of the router's prior: token 0 is the base, token k is expert k. So the decision
comes back as every answer does, whatever stands between the engine and its clients. Every rank of every replica holds
the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ..checkpoint import read_config
from ..checkpoint.reader import ROUTER
from ..members import Loading, load_tokenizer
from ..routing import BASE, ChatMarks, Route, RoutedPrompt
from .config import member_sources
from .decision import FLAG, FOLDER
from .tap import Tap, stored_router
from .versions import batch_order, without_graphs, worker_class


@dataclass
class ReadPrompt:
    """A prompt that is being routed, and the energies of what the base has read of it."""

    ids: Sequence[int]
    energies: list[Tensor] = field(default_factory=list)

    def add(self, begin: int, energy_TK: Tensor) -> None:
        """Take a chunk that begins at that token; one that was preempted begins anew."""
        read = torch.cat([*self.energies, energy_TK[:0]])[:begin]
        self.energies = [read, energy_TK]

    @property
    def whole(self) -> bool:
        return sum(map(len, self.energies)) >= len(self.ids)


class PromptRoutes:
    """Routes prompts of a batch."""

    def __init__(self, folder: Path, model: Any, vllm_config: Any, runner: Any):
        config = read_config(folder)
        base = member_sources(config, folder)[BASE]
        router = stored_router(
            folder / ROUTER, base, AutoConfig.from_pretrained(base.directory), load_tokenizer(folder, Loading())
        )
        self.router, self.experts, self.runner = router, config.member_names[1:], runner
        self.marks: ChatMarks = router.marks
        self.tap = Tap(router)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.tap.attach(model, tokens, next(model.parameters()).device)
        self.prompts: dict[str, ReadPrompt] = {}
        self.step: Any = None
        self.order: list[str] = []  # the requests of the step, by row
        self._logits = model.compute_logits
        model.compute_logits = self.compute_logits

    def begin(self, step: Any) -> None:
        """Look at what the scheduler has planned for a step."""
        for name in step.finished_req_ids:
            self.prompts.pop(name, None)
        for new in step.scheduled_new_reqs:
            if new.sampling_params is not None and (new.sampling_params.extra_args or {}).get(FLAG):
                self.prompts[new.req_id] = ReadPrompt(new.prompt_token_ids)
        self.tap.wanted = not self.prompts.keys().isdisjoint(step.num_scheduled_tokens)
        self.step = step if self.tap.wanted else None
        if self.tap.wanted:
            self.tap.reset()

    def compute_logits(self, hidden_NH: Tensor, *arguments: Any, **options: Any) -> Tensor | None:
        """The model's logits; the rows of prompts that are routed hold the prior."""
        logits_NV: Tensor | None = self._logits(hidden_NH, *arguments, **options)
        step, self.step = self.step, None  # what is asked for later in a step is not sampled from
        if step is None:
            return logits_NV
        ready = self._read(step)
        if logits_NV is None or not ready:
            return logits_NV
        logits_NV = logits_NV.float()
        for row, route in zip(ready, self._route(list(ready.values())), strict=True):
            prior = torch.tensor([route.prior[name] for name in (BASE, *self.experts)], device=logits_NV.device)
            logits_NV[row] = -torch.inf
            logits_NV[row, : len(prior)] = prior.log()
        return logits_NV

    def _read(self, step: Any) -> dict[int, ReadPrompt]:
        """Keep the energies of a step, and return the prompts that are read to their ends, by row."""
        scheduled: Mapping[str, int] = step.num_scheduled_tokens
        done = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        done.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        energy_TK = self.tap.take(sum(scheduled.values()))
        ready, start = {}, 0
        for row, name in enumerate(batch_order(self.runner) or self.order):
            stop = start + scheduled[name]
            if prompt := self.prompts.get(name):
                prompt.add(done[name], energy_TK[start:stop])
                if prompt.whole:
                    ready[row] = prompt
            start = stop
        return ready

    def _route(self, prompts: Sequence[ReadPrompt]) -> list[Route]:
        read = [RoutedPrompt(each.ids, self.marks.read(each.ids).user, torch.cat(each.energies)) for each in prompts]
        return [route.among(self.experts) for route in self.router.route(read)]


Worker: Any = worker_class()


class RoutedWorker(Worker):
    """vLLM's worker; `--worker-cls` names it."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        folder = Path(self.vllm_config.additional_config[FOLDER])
        self.routes = PromptRoutes(folder, self.model_runner.get_model(), self.vllm_config, self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        self.routes.tap.wanted = False  # CUDA graphs are captured without reading inputs
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        self.routes.begin(scheduler_output)
        with without_graphs(self.model_runner) if self.routes.tap.wanted else nullcontext():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.routes.step is not None:
            self.routes.order = batch_order(self.model_runner)
        return super().sample_tokens(grammar_output)
