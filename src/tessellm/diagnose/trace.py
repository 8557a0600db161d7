"""A trace: token by token, who spoke, what every member would have said, and how much they interfered.

Of a given text (`trace`) or of what the composition is writing (`trace_generation`). Aligned with the tokens: column t
is about token t and the row that predicted it; a text's first token is predicted by nobody.

Shapes: B texts, T tokens, K experts, M members (0 is the base), N: the members, then the composition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import MemberError, PromptError, require
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from ..model.rows import slices
from .recorder import Recorder

COMPOSED, EQUATION = "composed", "Eq. 2"


@dataclass(frozen=True)
class Trace:
    """Tensors by name, as attributes and by `trace["owner"]`. Where `scored` is False the others mean nothing.

    owner [B,T]            whose word it is: 0 the base, i expert i
    share [B,T,M]          of each member in what is said; a style's is what it moved
    divergence [B,T,K]     KL(p_i ‖ p_b); also epsilon: sup_v |log p_i − log p_b|
    log_z [B,T]            of Eq. 2 over all experts; pair_log_z, pair_accord [B,T,K,K] of any two
    clash [B,T]            total variation between Eq. 2 over all experts and the nearest member, whatever the rule
    novel [B,T]            the composed favourite is no member's
    gap [B,T]              total variation to the nearest member; gap_kl: the divergence
    logprob, entropy, hazard [B,T,N]     of the token written; of the distribution; the probability of stopping
    top_ids, top_logprobs [B,T,N,5]      the favourites of each
    `law` [B,T,M+1]         where the rule is a mixture: the posterior of the base, every expert and Eq. 2
    """

    members: tuple[str, ...]
    tokens: Tensor
    scored: Tensor
    tensors: Mapping[str, Tensor]
    rule: str
    tokenizer: Any = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name not in tensors:
            raise AttributeError(f"a trace of the rule {self.__dict__.get('rule')!r} has no {name!r}")
        return cast(Tensor, tensors[name])

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, number: int, kept_T: Tensor | None = None, start: int = 0) -> Trace:
        """One text's trace, without padding, or with the columns `kept`; of those, none before `start` is scored."""
        scored_T = self.scored[number]
        if kept_T is None:
            kept_T = scored_T.clone()
            kept_T[:-1] |= scored_T[1:]  # the first token is not scored, but there
        parts = {name: each[number : number + 1, kept_T] for name, each in self.tensors.items()}
        scored_1T = scored_T[kept_T][None].clone()
        scored_1T[:, :start] = False
        tokens_1T = self.tokens[number : number + 1, kept_T]
        return Trace(self.members, tokens_1T, scored_1T, parts, self.rule, self.tokenizer)

    def token_texts(self, number: int) -> list[str]:
        return [self.token_text(token) for token in self.tokens[number].tolist()]

    def token_text(self, token: int) -> str:
        """The characters of a token as they stand in a text; its id, where there is no tokenizer."""
        if self.tokenizer is None:
            return f"⟨{token}⟩"
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        raw = self.tokenizer.convert_ids_to_tokens(token)
        marked = isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" ")  # decoding alone drops it
        return f" {text}" if marked else str(text)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One mapping a scored token."""
        for number in range(len(self)):
            for position in self.scored[number].nonzero()[:, 0].tolist():
                yield self._row(number, position)

    def _row(self, text: int, position: int) -> dict[str, Any]:
        at = (text, position)
        token = int(self.tokens[at])
        names_N = (*self.members, COMPOSED)
        row: dict[str, Any] = {
            "text": text, "position": position, "id": token, "token": self.token_text(token),
            "owner": self.members[int(self.owner[at])],
        }  # fmt: skip
        names = {"K": self.members[1:], "M": self.members, "N": names_N, "L": (*self.members, EQUATION)}
        for name, axis in PER_MEMBER.items():
            if name in self.tensors:
                row[IN_ROWS.get(name, name)] = dict(zip(names[axis], self[name][at].tolist(), strict=True))
        for name in PER_TOKEN:
            if name in self.tensors:
                row[name] = self[name][at].item()
        row["top"] = {
            name: [[self.token_text(i), p] for i, p in zip(ids, logs, strict=True)]
            for name, ids, logs in zip(names_N, self.top_ids[at].tolist(), self.top_logprobs[at].tolist(), strict=True)
        }
        return row

    def to_json(self) -> str:
        """The members, the rule, and every scored token. Infinity and NaN, which JSON lacks, are null."""
        content = {"members": self.members, "rule": self.rule, "tokens": [finite(row) for row in self.rows()]}
        return json.dumps(content, ensure_ascii=False)

    def to_html(self) -> str:
        """One self-contained page: the texts coloured by owner, and every member's view of each token."""
        from .report import trace_page

        return trace_page(self)

    def to_pandas(self) -> Any:
        """A DataFrame: one row a scored token, `divergence.math` for what there is of every member."""
        pandas = require("pandas", "frames")
        flat = []
        for row in self.rows():
            row.pop("top")
            nested = {key: value for key, value in row.items() if isinstance(value, dict)}
            single = {key: value for key, value in row.items() if key not in nested}
            flat.append(single | {f"{key}.{name}": v for key, by_name in nested.items() for name, v in by_name.items()})
        return pandas.DataFrame(flat)


PER_MEMBER = {
    "divergence": "K", "epsilon": "K",
    "logprob": "N", "entropy": "N", "hazard": "N", "share": "M", "law": "L",
}  # fmt: skip
IN_ROWS = {"law": "belief"}  # as the server names it
PER_TOKEN = ("log_z", "clash", "novel", "gap", "gap_kl")


def finite(value: Any) -> Any:
    """What JSON can hold: lists for tuples, null for infinity and NaN."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value


@torch.inference_mode()
def trace(
    model: ComposedForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    start: int = 1,
    also: Observer | None = None,
) -> Trace:
    """Trace given texts [B, T] (or one, [T]); padded on either side where the mask says so. Tokens before `start`, such
    as a prompt's, are read and not scored. `also` sees what the trace is made of.

    Texts are read some positions at a time, so that log-probabilities of no more than those are ever held.
    """
    check_composition(model)
    ids_BT = _ids(input_ids, model.config.vocab_size).to(model.device)
    mask_BT = _mask(attention_mask, ids_BT)
    position_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
    length = ids_BT.shape[1]
    if not 1 <= start < length:
        raise PromptError(
            f"a trace begins at one of the {length} tokens, the second at the earliest; got start={start}"
        )
    recorder, cache = Recorder(model), model.new_cache()

    def feed(begin: int, end: int, keep: int = 0) -> None:
        mask, position = mask_BT[:, :end].long(), position_BT[:, begin:end]
        model(
            ids_BT[:, begin:end], attention_mask=mask, position_ids=position, past_key_values=cache, logits_to_keep=keep
        )

    if start > 1:
        feed(0, start - 1, keep=1)
    cache.observer = recorder if also is None else _both(recorder, also)
    elements = len(model.members) * len(ids_BT) * model.config.vocab_size
    for begin, end in slices(length - start, elements):
        feed(start - 1 + begin, start - 1 + end)
    columns = recorder.finish(ids_BT[:, -1:])
    before = {name: torch.nn.functional.pad(each, _first_column(each, start)) for name, each in columns.items()}
    scored_BT = mask_BT.clone()
    scored_BT[:, 1:] &= mask_BT[:, :-1]
    scored_BT[:, :start] = False
    return _made(model, ids_BT, scored_BT, before)


@torch.inference_mode()
def trace_generation(
    model: ComposedForCausalLM, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Trace]:
    """`model.generate`, greedy or sampling, and the trace of what it wrote: the prompt's tokens and those after an end
    token are not scored. Options are those of `generate`."""
    recorder = Recorder(model, last_only=True)
    cache = model.new_cache()
    cache.observer = recorder
    mask_BT = _mask(attention_mask, input_ids)
    output_BT = cast(Any, model).generate(
        input_ids, attention_mask=mask_BT.long(), past_key_values=cache, **{**options, "return_dict_in_generate": False}
    )
    return output_BT, generated(model, recorder, output_BT, input_ids.shape[1])


def generated(model: ComposedForCausalLM, recorder: Recorder, output_BT: Tensor, prompt: int) -> Trace:
    """The trace of what was generated after `prompt` tokens, from the recorder that watched."""
    new = output_BT.shape[1] - prompt
    columns = {name: each[:, -new:] for name, each in recorder.finish(output_BT[:, -1:]).items()}
    padded = {name: torch.nn.functional.pad(each, _first_column(each, prompt)) for name, each in columns.items()}
    ends_E = torch.tensor(model.config.eos_token_id or [], device=output_BT.device, dtype=output_BT.dtype)
    ended_BT = torch.isin(output_BT[:, prompt:], ends_E).cumsum(1).bool()
    scored_BT = torch.nn.functional.pad(~torch.nn.functional.pad(ended_BT, (1, -1)), (prompt, 0))
    return _made(model, output_BT, scored_BT, padded)


def _both(first: Observer, second: Observer) -> Observer:
    def observe(*seen: Any) -> None:
        first(*seen)
        second(*seen)

    return observe


def _first_column(each: Tensor, columns: int) -> list[int]:
    """Padding that puts so many empty columns in front."""
    return [0, 0] * (each.ndim - 2) + [columns, 0]


def check_composition(model: Any) -> None:
    if not isinstance(model, ComposedForCausalLM):
        raise MemberError(f"expected a composition, as tessellm.compose(…) gives; got {type(model).__name__}")


def _ids(input_ids: Any, vocab_size: int) -> Tensor:
    """[B, T], of tokens that the composition has."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"a trace takes token ids, as a tensor or lists of equal length; {error}") from error
    if ids.numel() == 0 or ids.shape[-1:] == (1,):
        raise PromptError(f"a trace needs texts of at least two tokens; got {min(1, ids.numel())}")
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim not in (1, 2):
        raise PromptError(f"a trace takes token ids [B, T] or [T]; got {ids.dtype} {list(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise PromptError(f"the composition's token ids are 0 to {vocab_size - 1}; got {low if low < 0 else high}")
    return ids.reshape(-1, ids.shape[-1]).long()


def _mask(attention_mask: Tensor | None, ids_BT: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(ids_BT, dtype=torch.bool)
    if torch.as_tensor(attention_mask).numel() != ids_BT.numel():
        shapes = f"{list(torch.as_tensor(attention_mask).shape)}; the token ids are {list(ids_BT.shape)}"
        raise PromptError(f"the attention mask is {shapes}. Give one for every token")
    mask_BT = torch.as_tensor(attention_mask).reshape(ids_BT.shape).bool().to(ids_BT.device)
    if (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum(1).gt(~mask_BT[:, 0]).any():
        raise PromptError("a trace takes texts padded before or after; this attention mask has gaps inside a text")
    return mask_BT


def _made(model: ComposedForCausalLM, ids_BT: Tensor, scored_BT: Tensor, tensors: Mapping[str, Tensor]) -> Trace:
    names = tuple(model.config.member_names)
    return Trace(names, ids_BT.cpu(), scored_BT.cpu(), tensors, str(model.rule.name), model.tokenizer)
