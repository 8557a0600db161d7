"""The composed model: the slow, obvious reference that every fast path is held to.

`ComposedForCausalLM` runs every member on the same tokens, turns their logits into log-probabilities over the shared
vocabulary, and lets the rule combine them. Its `logits` are the composed log-probabilities. It knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import MemberError, PromptError, RecipeError
from ..routing.route import Route, Router
from ..routing.template import ChatMarks
from ..rules import LARGEST_WEIGHT, ComposedRule, RuleLike, normalised
from ..vocabulary import Alignment
from .cache import ComposedCache
from .config import ComposedConfig
from .heads import widen_head
from .hf_generate import ComposedGenerationMixin
from .routes import route
from .rows import kept_rows, mask_rows, slices
from .transcript import Restarts, Routing


@dataclass
class ComposedOutput(CausalLMOutputWithPast):
    """`logits` are composed log-probabilities; `member_logprobs`, if asked for, are logp_MBTV."""

    member_logprobs: Tensor | None = None


class ComposedForCausalLM(PreTrainedModel, ComposedGenerationMixin):
    """Several language models that share a base, as one. Build it with `tessellm.compose` or `from_pretrained`."""

    config_class = ComposedConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: list[str] = []  # noqa: RUF012
    loaded_members: tuple = ()  # members.Member: where each came from
    notes: tuple[str, ...] = ()  # what a user should know of how the members fit together
    tokenizer: Any = None
    _marks: tuple[Any, Any, ChatMarks] | None = None
    router: Router | None = None  # decides from a prompt which members answer
    rule: ComposedRule

    def __init__(
        self,
        config: ComposedConfig,
        members: Mapping[str, PreTrainedModel] | None = None,
        alignments: Mapping[str, Alignment] | None = None,
        rule: RuleLike | None = None,
    ):
        super().__init__(config)
        if not members:
            raise MemberError(
                "a composition cannot be made from its config alone, since its members hold the weights. Use "
                "tessellm.compose(...) or ComposedForCausalLM.from_pretrained(folder)"
            )
        assert list(members) == config.member_names
        for member in members.values():
            widen_head(member)
        self.members = nn.ModuleDict(members)
        identity = Alignment(None, config.vocab_size)
        self.alignments = {name: (alignments or {}).get(name, identity) for name in members}
        devices = {name: str(member.device) for name, member in members.items()}
        if len(set(devices.values())) > 1 or any(hasattr(member, "hf_device_map") for member in members.values()):
            self.hf_device_map = devices  # tells Hugging Face libraries not to move the model
        self._go_by(self._made(rule or config.rule, config.weights))
        self.generation_config = GenerationConfig.from_model_config(config)
        self.eval()

    def set_rule(self, rule: RuleLike | None = None, weights: Sequence[float] | None = None) -> None:
        """Change the rule (a name, a mapping with `name` and parameters, or an object) or the weights. The rule
        `mixture` calibrates a router first, if the model has none."""
        rule, weights = self.rule.rule if rule is None else rule, self.config.weights if weights is None else weights
        self._go_by(self._made(self.config.meant(rule), weights))
        if self.router is None and self.rule.routed is not None:
            from ..routing.calibrated import prepare_router

            prepare_router(self)

    def _made(self, rule: RuleLike, weights: Sequence[float]) -> ComposedRule:
        try:
            return ComposedRule.make(rule, weights, [member.get("end_ids", ()) for member in self.config.members])
        except ValueError as error:
            raise RecipeError(str(error)) from None

    @property
    def markers(self) -> ChatMarks:
        """The marks of the chat template; all empty without one."""
        template = getattr(self.tokenizer, "chat_template", None)
        if self._marks is None or self._marks[:2] != (self.tokenizer, template):
            self._marks = (self.tokenizer, template, ChatMarks.of(self.tokenizer))
        return self._marks[2]

    def _go_by(self, rule: ComposedRule) -> None:
        try:
            rule.check_fit(len(self.members) - 1)
        except ValueError as error:
            why = f"the rule {rule.name!r} does not fit these members: {error}. Compose them again"
            raise RecipeError(why) from None
        numbers = self._checked_weights(rule)
        self.rule, self.config.rule = rule, rule.describe()
        for member, number in zip(self.config.members[1:], numbers, strict=True):
            member["weight"] = number

    def _checked_weights(self, rule: ComposedRule) -> list[float]:
        numbers, count = [float(weight) for weight in rule.weights or ()], len(self.members) - 1
        if len(numbers) != count or not all(abs(number) <= LARGEST_WEIGHT for number in numbers):
            most = f"{LARGEST_WEIGHT:,.0f}"
            raise MemberError(f"expected {count} weights within ±{most}, one an expert; got {numbers}")
        return numbers

    @property
    def base(self) -> PreTrainedModel:
        return self.member("base")

    def member(self, name: str) -> PreTrainedModel:
        return cast(PreTrainedModel, self.members[name])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_member_logprobs: bool = False,
        answer_start: int | Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ComposedOutput | tuple:
        """As of any Hugging Face model. `answer_start`: the column, cached ones counted, at which the answer begins, of
        all texts or of each. Without it, answers begin behind the chat template's marks."""
        if input_ids is None:
            raise PromptError(
                "a composition reads input_ids: members have embeddings of their own, so inputs_embeds are not taken"
            )
        cache = self._checked_cache(past_key_values)
        self._check_input(input_ids, cache)
        if cache is None and (use_cache if use_cache is not None else self.config.use_cache):
            cache = self.new_cache()
        mask_BT = mask_rows(attention_mask, input_ids)
        running = cache if cache is not None else ComposedCache([], self.rule)
        routing = self.routing
        if routing is not None:
            if answer_start is not None:
                running.transcript.answer_start = answer_start
            running.transcript.read(input_ids, mask_BT)
        rows = self._rows_needed(input_ids, mask_BT, logits_to_keep, running)
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
        caches = cache.caches if cache is not None else [None] * len(self.members)
        logits_M = []
        for name, member_cache in zip(self.members, caches, strict=True):
            with self._tapped(name, running):
                logits_M.append(self.member_logits(name, input_ids, member_cache, rows, inputs))
        steps = logits_M[0].shape[1]
        look = input_ids.shape[1] > 1 or input_ids.device.type == "cpu"  # a GPU would have to wait for it at every step
        restarts = None if routing is None else running.transcript.restarts(routing, steps)
        composed_BTV, logp_MBTV = self._combine(
            logits_M, input_ids[:, -steps:], mask_BT[:, -steps:], running, output_member_logprobs, look, restarts
        )
        kept = slice(None) if isinstance(rows, Tensor) else kept_rows(logits_to_keep)
        composed_BTV = composed_BTV[:, kept]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=composed_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = ComposedOutput(
            loss=loss,
            logits=composed_BTV,  # type: ignore[arg-type]
            past_key_values=cache,
            member_logprobs=torch.cat(logp_MBTV, dim=2)[:, :, kept] if output_member_logprobs else None,
        )
        return output if return_dict is not False else output.to_tuple()

    def route(self, prompts: Any) -> Route | list[Route]:
        """Return what the router says of a prompt (a text, messages or token ids), or of each in a list. Runs the base
        alone. A text is one user message of the chat template."""
        return route(self, prompts)

    def member_logits(
        self, name: str, input_ids: Tensor, cache: Cache | None, rows: int | Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """One member's logits over the shared vocabulary, on the device of the ids."""
        member, alignment = self.member(name), self.alignments[name]
        moved = {key: value.to(member.device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        output = member(
            input_ids=alignment.to_member(input_ids).to(member.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=rows,
            **moved,
        )
        return alignment.to_composed(output.logits).to(input_ids.device)

    def _combine(
        self,
        logits_M: list[Tensor],
        tokens_BT: Tensor,
        mask_BT: Tensor,
        cache: ComposedCache,
        keep_members: bool,
        look: bool,
        restarts: Restarts | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The rule over all rows, some rows at a time: log-probabilities of a long text in float32 are large, so the
        members' own are kept only if asked for."""
        composed, members = [], []
        for start, stop in slices(logits_M[0].shape[1], len(logits_M) * logits_M[0][:, :1].numel()):
            rows = [logits_BTV[:, start:stop] for logits_BTV in logits_M]
            logp_MBTV = normalised(rows)
            if look:
                self._check_numbers(logp_MBTV)
            part = None if restarts is None else restarts.part(start, stop)
            composed.append(cache.compose(logp_MBTV, tokens_BT[:, start:stop], mask_BT[:, start:stop], part))
            if keep_members:
                members.append(logp_MBTV)
        return torch.cat(composed, dim=1), members

    def _rows_needed(
        self, input_ids: Tensor, mask_BT: Tensor, keep: int | Tensor, cache: ComposedCache
    ) -> int | Tensor:
        """How many of the last positions need logits, 0: all. A rule with state reads more than are kept; of a long
        prompt, one that is routed seldom all."""
        if not self.rule.stateful:
            return keep
        if isinstance(keep, Tensor) or keep == 0 or keep >= mask_BT.shape[1] or (routing := self.routing) is None:
            return 0
        return cache.transcript.rows_needed(routing, mask_BT.shape[1], keep)

    @property
    def routing(self) -> Routing | None:
        """What decides about priors, if the rule takes them from outside."""
        rule = self.rule.routed
        return None if rule is None else Routing(rule, self.config.member_names, self.router, self.markers)

    @contextmanager
    def _tapped(self, name: str, cache: ComposedCache) -> Iterator[None]:
        """Collect the energies of the base's forward pass, if a router needs them."""
        if name != "base" or self.router is None or self.rule.routed is None:
            yield
            return
        with self.router.tap(self.base) as tap:
            yield
        cache.transcript.hear(tap.take())

    def _check_numbers(self, logp_MBTV: Tensor) -> None:
        """Name the member whose weights are broken, rather than write nonsense."""
        broken_M = logp_MBTV.isnan().flatten(1).any(1)
        if broken_M.any():
            name = self.config.member_names[int(broken_M.int().argmax())]
            raise MemberError(f"member {name!r} computes NaN: its weights are damaged, or overflow in {self.dtype}")

    def new_cache(self) -> ComposedCache:
        """An empty dynamic cache for this composition."""
        return ComposedCache([DynamicCache(config=self.member(name).config) for name in self.members], self.rule)

    def _checked_cache(self, cache: Cache | None) -> ComposedCache | None:
        if isinstance(cache, ComposedCache) and cache.rule != self.rule:
            raise ValueError("this cache was made under another rule or other weights; start with model.new_cache()")
        if cache is None or isinstance(cache, ComposedCache):
            return cache
        raise TypeError(
            f"a composition needs one cache a member: expected a ComposedCache (model.new_cache()), "
            f"got {type(cache).__name__}"
        )

    def _check_input(self, input_ids: Tensor, cache: ComposedCache | None) -> None:
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise PromptError(
                f"the prompt is empty: expected token ids of shape [batch, length ≥ 1], got {tuple(input_ids.shape)}. "
                "Give a prompt, or start from the beginning-of-text token"
            )
        length = input_ids.shape[1] + (cache.get_seq_length() if cache is not None else 0)
        if (limit := self.config.max_position_embeddings) and length > limit:
            raise PromptError(
                f"{length} tokens are too many: the shortest context among the members is {limit}. Shorten the "
                "prompt or max_new_tokens"
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a saved composition; see `tessellm.checkpoint`."""
        from ..checkpoint import load_as_hugging_face

        return load_as_hugging_face(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory: Any, self_contained: bool = False, **kwargs: Any) -> None:  # type: ignore[override]
        """Save links to the members, or, if self-contained, the members themselves; see `tessellm.checkpoint`."""
        from ..checkpoint import save

        for key in ("safe_serialization", "is_main_process"):  # the only values that they can have here
            if kwargs.pop(key, True) is not True:
                raise TypeError(f"a composition cannot be saved with {key}=False")
        save(self, save_directory, self_contained, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """Refused: what would be uploaded are links to this machine's folders."""
        raise MemberError(
            "a composition is uploaded as a folder: save_pretrained(folder, self_contained=True), then "
            "`hf upload REPOSITORY folder`"
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.base.get_output_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise MemberError("a composition's vocabulary is its members'; resize the members, then compose them")

    def _init_weights(self, module: nn.Module) -> None:
        """Members come with their weights."""
