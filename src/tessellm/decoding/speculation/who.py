"""Who drafts, as a user says it or as the composition suggests. Knows members, no passes.

lookup        what followed the last time that the text ended as it does now
member:NAME   that member, alone
belief        whomever the rule `belief` believes most; the other members rest meanwhile, and read what was written
              in one pass. belief:N: for N tokens at most
none          nobody: all members read every token

Members rest in the device's memory, never in the host's (`host`, `belief:host`: refused, see docs/resting.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import EngineError, nearest
from ...model import ComposedForCausalLM
from ..members.stacking import shares_base
from .costs import CPU, GPU, Costs

LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # of drafts; few, since each may be compiled or captured for itself
LENGTHS_ON_GPU = (3, 7, 15, 31)  # a pass has one token more: it fills the blocks of rows that kernels compute anyway
LONGEST = {"lookup": 8, "member": 8, "belief": 16}  # tokens of a draft, by who drafts
LONGEST_ON_GPU = {**LONGEST, "belief": 31}  # where a token more to verify costs next to nothing
SHORTEST = {
    "lookup": 1,
    "member": 1,
    "belief": 3,
}  # each length is tried: whoever is believed is right or wrong for long


ON_HOST = (
    "members cannot rest in the host's memory: all of them read every block of text, and to fetch one takes as long as "
    "writing some 54 tokens does (docs/resting.md). Let them rest where they are ('belief'), or leave out experts"
)


@dataclass(frozen=True)
class Speculation:
    """Who drafts: `lookup`, `member:NAME`, `belief`, `belief:N` or `none`."""

    draft: str = "lookup"

    def __post_init__(self) -> None:
        kind, colon, given = self.draft.partition(":")
        if self.draft in ("host", "belief:host"):
            raise EngineError(ON_HOST)
        known = {"lookup": not colon, "none": not colon, "member": given, "belief": not colon or given.isdecimal()}
        if not known.get(kind) or (kind == "belief" and colon and not 1 <= int(given) <= LENGTHS[-1]):
            raise EngineError(
                f"who drafts: expected 'lookup', 'member:NAME', 'belief', 'belief:N' (1 to {LENGTHS[-1]} tokens) or "
                f"'none'; got {self.draft!r}"
            )

    def check(self, model: ComposedForCausalLM) -> None:
        """Raise EngineError where the composition has no such member, or believes none."""
        if self.member and self.member not in model.members:
            raise EngineError(f"no member {self.member!r} to draft; {nearest(self.member, model.members)}")
        if self.by_belief and not model.rule.lets_members_rest:
            raise EngineError(
                "drafts by belief need the rule 'belief', which says whom it believes, without styles, which nobody "
                f"speaks alone; this composition has {model.rule.name!r}. Compose so, or let others draft"
            )

    @property
    def kind(self) -> str:
        return self.draft.partition(":")[0]

    @property
    def by_belief(self) -> bool:
        return self.kind == "belief"

    @property
    def member(self) -> str:
        """Name the member that drafts; empty where nobody was named."""
        return self.draft.partition(":")[2] if self.kind == "member" else ""

    def lengths(self, on_cpu: bool) -> tuple[int, ...]:
        """List the lengths of drafts to choose from."""
        lengths, usual = (LENGTHS, LONGEST) if on_cpu else (LENGTHS_ON_GPU, LONGEST_ON_GPU)
        given = self.draft.partition(":")[2]
        longest = int(given) if self.by_belief and given else usual[self.kind]
        fitting = [length for length in lengths if length <= longest] or [lengths[0]]
        return tuple(length for length in fitting if length >= SHORTEST[self.kind]) or (fitting[-1],)


NOBODY = Speculation("none")


def costs_of(model: ComposedForCausalLM) -> Costs:
    """Count what passes of a composition read, for the model of the cost."""
    base, *experts = (model.member(name) for name in model.members)
    lora = sum(shares_base(expert, base) for expert in experts)
    return Costs(CPU if model.device.type == "cpu" else GPU, 1 + len(experts) - lora, lora)


def suggested(model: ComposedForCausalLM) -> Speculation:
    """Let members rest where that pays, by the model of the cost: where each reads weights of its own. A LoRA expert is
    a row more through the base's weights, which takes less than reading it later."""
    return Speculation("belief") if model.rule.lets_members_rest and costs_of(model).pays else NOBODY
