"""What to do, in words that follow from the numbers: at most five findings, the gravest first.

Each says what was seen, on which tokens, and what was measured to help or not to: no change of rule or weights is
advised that was not tried on the texts, with what it loses and what it wins. An expert that nobody hears, and
texts that are too few to tell, need no trial. Nothing is said that does not hold of the rule in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from .changes import Effect
from .interference import Interference, Pair
from .rates import Rate, counted, percent

MOST = 5  # findings
WORTH_SAYING = 0.01  # share of tokens
IDLE = 0.001
FEW_TEXTS = 9  # fewer say nothing about new ones
NAMED = 5  # prompts that are listed
LIKELY_RIGHT = 0.8  # share of texts predicted right, above which nothing is said
ADDS_UP = "product"  # the rule that counts twice what two experts want


@dataclass(frozen=True)
class Advice:
    """One finding. `kind`: clean, rule, novel, better, kept, contradict, repeat, crowd, idle, unsure, few."""

    kind: str
    text: str
    experts: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()  # counted from 0
    effect: Effect | None = None  # of what it advises


@dataclass(frozen=True)
class Symptoms:
    """All that findings are made of."""

    found: Interference
    rule: str
    weights: Sequence[float]
    predicted: Rate
    loss: float
    texts: int
    written: bool  # by the composition, rather than given
    effects: tuple[Effect, ...]

    def of(self, *kinds: str) -> list[Effect]:
        """Return the effects of changes of these kinds, the best first."""
        return sorted((each for each in self.effects if each.change.kind in kinds), key=lambda each: -each.gain)

    def without(self, names: Sequence[str]) -> list[Effect]:
        return [each for each in self.of("without") if each.change.without in names]


def advise(symptoms: Symptoms) -> list[Advice]:
    """Return the findings: what helps most first, then the gravest."""
    trouble = [*about_pairs(symptoms), *about_rule(symptoms)]
    trouble.sort(key=lambda each: -round(each.effect.gain, 1) if each.effect else 0.0)
    unsure, better = about_certainty(symptoms), about_better(symptoms, trouble)
    findings = trouble or [clean(symptoms, settled=not unsure and not better)]
    findings = [*findings, *better, *about_experts(symptoms), *unsure]
    few = about_number(symptoms.texts)
    return [*findings[: MOST - len(few)], *few]


def clean(symptoms: Symptoms, settled: bool) -> Advice:
    found = symptoms.found
    tried = symptoms.of("rule", "weights")
    conclusion = ""
    if settled:
        conclusion = " Nothing needs to be changed" + (f": {nothing_better(tried)}." if tried else ".")
    return Advice(
        "clean",
        f"These experts compose: they interfere on {found.interfering} of the tokens, and the composition says what "
        f"nobody would on {found.novel}.{conclusion}",
    )


def serious(rate: Rate) -> bool:
    return rate.value > WORTH_SAYING and rate.low > 0


def doubtful(found: Interference) -> list[str]:
    """Name the experts that a composition may be better without, the most at odds with the others first."""
    odds = dict.fromkeys(found.active, 0.0)
    for pair in found.pairs:
        for name in pair.experts:
            odds[name] += pair.contradict.value + pair.repeat.value
    crowd = crowded(found.pairs)
    at_odds = (name for name, share in odds.items() if share > WORTH_SAYING)
    return sorted(at_odds, key=lambda name: (name != crowd, -odds[name]))


def nothing_better(tried: Sequence[Effect]) -> str:
    """Say by how much nothing is better, and what was tried."""
    first, each = tried[0], "; ".join(each.short for each in tried)
    least = f"{first.least:g} nats" if first.given else f"{first.least:.0%}".replace("%", "\u00a0%")
    but = " without losing on more texts than it wins on" if any(each.gain > each.least for each in tried) else ""
    before = f"{first.unit} {first.number(fmean(first.before))}"
    return f"nothing that was tried is better by more than {least}{but} ({before}; {each})"


def remedy(tried: Sequence[Effect], keep: str) -> tuple[str, Effect | None]:
    """Say what to do: the best change if it helps, else that none does and what to keep."""
    if not tried:
        return "", None
    best = tried[0]
    if best.helps:
        action = best.change.action
        return f" {action[0].upper()}{action[1:]}: {best.unit} {best}.", best
    return f" Keep {keep}: {nothing_better(tried)}.", None


def about_pairs(symptoms: Symptoms) -> list[Advice]:
    """Tell of each pair that contradicts itself, or, where the rule adds up, wants the same: whichever is more."""
    adds_up = symptoms.rule == ADDS_UP
    findings: list[Advice] = []
    pairs = sorted(symptoms.found.pairs, key=lambda pair: -pair.contradict.value - adds_up * pair.repeat.value)
    crowd = crowded(pairs)
    for pair in pairs:
        both = " and ".join(pair.experts)
        if serious(pair.contradict) and (not adds_up or pair.contradict.value >= pair.repeat.value):
            if crowd in pair.experts:
                if not any(each.kind == "crowd" for each in findings):
                    findings.append(about_crowd(symptoms, crowd, [each for each in pairs if crowd in each.experts]))
                continue
            what = f"{both} contradict each other on {pair.contradict} of the tokens{places(pair)}."
            cure, effect = remedy(symptoms.without(pair.experts), "both")
            findings.append(Advice("contradict", what + cure, pair.experts, pair.texts, effect))
        elif adds_up and serious(pair.repeat):
            what = f"{both} want the same on {pair.repeat} of the tokens{places(pair)}, and Eq. 2 counts it twice."
            cure, effect = remedy(symptoms.without(pair.experts), "both")
            findings.append(Advice("repeat", what + cure, pair.experts, pair.texts, effect))
    return findings[:2]


def places(pair: Pair) -> str:
    if not pair.texts:
        return ""
    numbers = ", ".join(str(text + 1) for text in pair.texts[:NAMED]) + (", …" if len(pair.texts) > NAMED else "")
    worst, plural = pair.places[0], "s" if len(pair.texts) > 1 else ""
    at = f"token {worst.position + 1} of prompt {worst.text + 1}, {worst.token!r}"
    return f" (prompt{plural} {numbers}; worst at {at})"


def crowded(pairs: Sequence[Pair]) -> str:
    """Name the expert that contradicts several others, and of those the one that does so most; "" if none does."""
    against: dict[str, list[float]] = {}
    for pair in pairs:
        if serious(pair.contradict):
            for name in pair.experts:
                against.setdefault(name, []).append(pair.contradict.value)
    return max((name for name, theirs in against.items() if len(theirs) > 1), key=lambda n: sum(against[n]), default="")


def about_crowd(symptoms: Symptoms, name: str, pairs: Sequence[Pair]) -> Advice:
    """Tell of an expert at odds with several others."""
    theirs = [pair for pair in pairs if serious(pair.contradict)]
    others = ", ".join(f"{_other(pair, name)} on {percent(pair.contradict.value)}" for pair in theirs)
    what = f"{name} contradicts {others} of the tokens{places(theirs[0])}: more than any other expert does."
    cure, effect = remedy(symptoms.without([name]), name)
    return Advice("crowd", what + cure, (name,), theirs[0].texts, effect)


def _other(pair: Pair, name: str) -> str:
    return pair.experts[1] if pair.experts[0] == name else pair.experts[0]


def about_rule(symptoms: Symptoms) -> list[Advice]:
    """Tell where the composition says what no member would, or Eq. 2 multiplies what interferes."""
    found = symptoms.found
    tried = symptoms.of("rule", "weights")
    cure, effect = remedy(tried, f"rule: {symptoms.rule}")
    if serious(found.novel):
        what = (
            f"On {found.novel} of the tokens the composition prefers what no member would say: an error, unless "
            "features are blended (content and style, say)."
        )
        return [Advice("novel", what + cure, effect=effect)]
    if serious(found.interfering) and symptoms.rule == ADDS_UP:
        size = f"mean |log Z| {found.log_z.value:.2f} nats"
        what = f"The experts interfere on {found.interfering} of the tokens ({size}), and Eq. 2 adds all of it up."
        return [Advice("rule", what + cure, effect=effect)]
    return []


def about_better(symptoms: Symptoms, findings: Sequence[Advice]) -> list[Advice]:
    """Tell of a rule or weights that do better, or that none does, unless that was said."""
    tried = symptoms.of("rule", "weights")
    if not tried or any(each.kind in ("rule", "novel") for each in findings) or not (findings or tried[0].helps):
        return []
    cure, effect = remedy(tried, f"rule: {symptoms.rule}")
    return [Advice("better" if effect else "kept", cure.strip(), effect=effect)]


def about_experts(symptoms: Symptoms) -> list[Advice]:
    found = []
    for (name, rate), weight in zip(symptoms.found.active.items(), symptoms.weights, strict=True):
        if weight == 0:
            text = f"{name} has the weight 0: it says nothing, and costs a model. Give it a weight, or drop it."
            found.append(Advice("idle", text, (name,)))
        elif rate.value < IDLE:
            text = (
                f"{name} changes nothing on these prompts: it is active on {rate} of the tokens, and costs a model. "
                "Drop it, or ask what it is for."
            )
            found.append(Advice("idle", text, (name,)))
    return found


def about_certainty(symptoms: Symptoms) -> list[Advice]:
    """Tell of texts that are likely to be wrong, though nobody quarrels: the members do not know themselves."""
    if symptoms.predicted.value >= LIKELY_RIGHT or not symptoms.written:
        return []
    text = (
        f"Only {symptoms.predicted} of these texts are predicted right; composing costs {percent(symptoms.loss)}, the "
        "rest is the members' own uncertainty. Look at the texts: where they err, an expert or its weight is too weak."
    )
    return [Advice("unsure", text)]


def about_number(texts: int) -> list[Advice]:
    if texts >= FEW_TEXTS:
        return []
    given, are = counted(texts, "text"), "is" if texts == 1 else "are"
    return [Advice("few", f"{given} {are} too few to say anything about new ones. Give {FEW_TEXTS} prompts or more.")]
