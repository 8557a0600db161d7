"""How much is measured: on two cores, and on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessellm.demo.adapters import DOMAINS
from tessellm.errors import TessellmError, nearest
from tessellm.rules import Mixture, rule_names

from .skills import SKILLS

EQ2 = "product"
MAIN = "five"  # the set that is measured in full, with all peers
SETS = {  # experts that are composed; the last ones are of another training
    MAIN: DOMAINS,
    "six": tuple(SKILLS),
    "math+code": ("math", "code"),
    "six-other": tuple(SKILLS),
}
BLENDS = {f"{name}+capitals": (name, "capitals") for name in ("math", "intents", "sql")}
TWO = "two requests"
TWINS = "twins"  # the five, and math by another seed
PAIRS = (("sql", "intents"), ("intents", "bash"), ("bash", "math"), ("math", "sql"))


@dataclass(frozen=True)
class Plan:
    """One size of the experiment. Numbers of prompts: None for all that there are."""

    read: int | None  # texts per task whose likelihood is measured
    write: int | None  # prompts per task
    writing: tuple[str, ...]  # tasks that are written
    develop: int  # prompts per skill by which merges get their strength
    develop_by_writing: bool
    sets: tuple[str, ...]
    rules: tuple[str, ...]
    merges: tuple[str, ...]
    strengths: tuple[float, ...] | None  # that merges are tried with; None: those of each method
    arrow: tuple[int, ...]  # experts that are heard at once
    two: int  # prompts per pair of skills
    batch_size: int
    at_once: int  # prompts for which a column of one model writes together, by the reference; 0: as others do
    numbers: int  # log-probabilities that reading holds at once
    timed: int  # prompts that columns write for again, to be timed; 0: as they wrote for the tasks
    new_tokens: int | None = None  # at most
    router: bool = True
    others: int | None = None  # prompts per task of sets but the main one, which then have few columns; None: as many

    def of_set(self, name: str) -> Plan:
        """What is measured of a set: of those but the main one with fewer prompts, and without what tells nothing new:
        peers where nobody asks for two skills at once, Eq. 2 where nothing is blended."""
        if self.others is None or name == MAIN:
            return self
        rules = tuple(rule for rule in self.rules if rule == Mixture.name or (rule == EQ2 and name in BLENDS))
        few = replace(self, read=self.others, write=self.others, rules=rules)
        return few if name == TWO else few.without_peers()

    def without_peers(self) -> Plan:
        return replace(self, merges=(), arrow=(), router=False, timed=0)

    def of_rules(self, rules: Sequence[str]) -> Plan:
        """The same with these rules alone beside base and experts: no peers."""
        for name in rules:
            if name not in rule_names():
                raise TessellmError(f"unknown rule {name!r}; {nearest(name, rule_names())}")
        return replace(self, rules=tuple(rules)).without_peers()

    def limited(self, prompts: int | None, sets: tuple[str, ...] | None) -> Plan:
        """The same with fewer prompts, or other sets."""
        for name in sets or ():
            if name not in ALL_SETS:
                raise TessellmError(f"unknown set {name!r}; {nearest(name, ALL_SETS)}")
        plan = self if sets is None else replace(self, sets=sets)
        if prompts is None:
            return plan
        return replace(
            plan,
            read=prompts,
            write=prompts,
            others=None if plan.others is None else min(prompts, plan.others),
            develop=min(prompts, plan.develop),
            two=min(prompts, plan.two),
        )


ALL_SETS = (*SETS, *BLENDS, TWO, TWINS)
PLANS = {
    "cpu": Plan(
        read=4, write=6, writing=("bash", "intents", "sql", "capitals"), develop=2, develop_by_writing=False,
        sets=("six",), rules=("mixture", EQ2), merges=("task-arithmetic",), strengths=(0.2, 0.4), arrow=(), two=0,
        batch_size=6, at_once=0, numbers=1 << 28, timed=0, new_tokens=56,
    ),
    "full": Plan(
        read=None, write=None, writing=tuple(SKILLS), develop=40, develop_by_writing=True, sets=ALL_SETS,
        rules=tuple(rule_names()), merges=("task-arithmetic", "ties", "dare-ties"), strengths=None, arrow=(1, 3),
        two=60, batch_size=96, at_once=256, numbers=1 << 28, timed=128, others=150,
    ),
}  # fmt: skip
