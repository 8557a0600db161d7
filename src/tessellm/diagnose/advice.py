"""What to do, in words that follow from the numbers. Every sentence names who, how much and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .certificate import Certificate
from .interference import Interference, Pair
from .rates import Rate, counted, percent

WORTH_SAYING = 0.01  # share of tokens
IDLE = 0.001
EVERYWHERE = 0.5
FEW_TEXTS = 9  # fewer say nothing about new ones (see rates.new_text_limit)
NAMED = 5  # prompts that are listed
LIKELY_RIGHT = 0.8  # share of texts predicted right, above which nothing is said


@dataclass(frozen=True)
class Advice:
    """One finding. `kind`: clean, contradict, repeat, crowd, idle, everywhere, rule, novel, stopping, unsure, few."""

    kind: str
    text: str
    experts: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()  # counted from 0


def advise(
    found: Interference,
    proof: Certificate,
    rule: str,
    termination: str,
    predicted: Rate,
    loss: float,
    weights: Sequence[float],
) -> list[Advice]:
    """The findings, the gravest first."""
    trouble = [*about_pairs(found.pairs), *about_crowds(found.pairs), *about_rule(found, rule)]
    if serious(found.stopping) and termination != "owner":
        text = (
            f"The members disagree about stopping on {found.stopping} of the tokens. Use termination: owner, so that "
        )
        trouble.append(Advice("stopping", text + "only the member that owns the run may end it."))
    unsure = about_certainty(predicted, loss)
    said = [
        *(trouble or [clean(found, "" if unsure else " Nothing needs to be changed.")]),
        *about_experts(found, weights),
        *unsure,
    ]
    if len(proof.texts) < FEW_TEXTS:
        given, are = counted(len(proof.texts), "text"), "is" if len(proof.texts) == 1 else "are"
        text = f"{given} {are} too few to say anything about new ones. Give {FEW_TEXTS} prompts or more."
        said.append(Advice("few", text))
    return said


def clean(found: Interference, conclusion: str) -> Advice:
    return Advice(
        "clean",
        f"These experts compose: they interfere on {found.interfering} of the tokens, and the composition says what "
        f"nobody would on {found.novel}.{conclusion}",
    )


def about_certainty(predicted: Rate, loss: float) -> list[Advice]:
    """Texts that are likely to be wrong, though nobody quarrels: the members do not know themselves."""
    if predicted.value >= LIKELY_RIGHT:
        return []
    text = (
        f"Only {predicted} of these texts are predicted right; composing costs {percent(loss)}, the rest is the "
        "members' own uncertainty. Look at the texts: if they are wrong, an expert is too weak, or its weight is."
    )
    return [Advice("unsure", text)]


def serious(rate: Rate) -> bool:
    return rate.value > WORTH_SAYING and rate.low > 0


def about_pairs(pairs: Sequence[Pair]) -> list[Advice]:
    said = []
    for pair in sorted(pairs, key=lambda pair: -pair.contradict.value - pair.repeat.value):
        both = " and ".join(pair.experts)
        if serious(pair.contradict):
            text = (
                f"{both} contradict each other on {pair.contradict} of the tokens{places(pair)}. Leave one of them out "
                "where it is not needed, or lower its weight."
            )
            said.append(Advice("contradict", text, pair.experts, pair.texts))
        if serious(pair.repeat):
            text = (
                f"{both} want the same on {pair.repeat} of the tokens{places(pair)}, and a rule that adds them up "
                "counts it twice. Drop one of them, or give each half of its weight."
            )
            said.append(Advice("repeat", text, pair.experts, pair.texts))
    return said


def places(pair: Pair) -> str:
    if not pair.texts:
        return ""
    numbers = ", ".join(str(text + 1) for text in pair.texts[:NAMED]) + (", …" if len(pair.texts) > NAMED else "")
    worst, plural = pair.places[0], "s" if len(pair.texts) > 1 else ""
    at = f"token {worst.position + 1} of prompt {worst.text + 1}, {worst.token!r}"
    return f" (prompt{plural} {numbers}; worst at {at})"


def about_crowds(pairs: Sequence[Pair]) -> list[Advice]:
    """An expert at odds with several others is the one to drop or to weaken."""
    against: dict[str, list[Pair]] = {}
    for pair in pairs:
        if serious(pair.contradict):
            for name in pair.experts:
                against.setdefault(name, []).append(pair)
    crowded = {name: theirs for name, theirs in against.items() if len(theirs) > 1}
    if not crowded:
        return []
    worst = max(crowded, key=lambda name: sum(pair.contradict.value for pair in crowded[name]))
    others = ", ".join(next(name for name in pair.experts if name != worst) for pair in crowded[worst])
    text = f"{worst} is at odds with {others}: of all experts it contradicts the others most. Try without it first."
    return [Advice("crowd", text, (worst,))]


def about_rule(found: Interference, rule: str) -> list[Advice]:
    said = []
    if serious(found.interfering) and rule == "product":
        text = (
            f"The experts interfere on {found.interfering} of the tokens (mean |log Z| {found.log_z.value:.2f} nats), "
            "and Eq. 2 multiplies all of it. Use rule: evidence, which lets one owner speak there."
        )
        said.append(Advice("rule", text))
    if serious(found.novel):
        cure = "fewer experts, or lower weights, help" if rule == "evidence" else "use rule: evidence"
        text = (
            f"On {found.novel} of the tokens the composition prefers what no member would say. Unless features are "
            f"blended (content and style, say), that is an error: {cure}."
        )
        said.append(Advice("novel", text))
    return said


def about_experts(found: Interference, weights: Sequence[float]) -> list[Advice]:
    said = []
    for (name, rate), weight in zip(found.active.items(), weights, strict=True):
        if weight == 0:
            text = f"{name} has the weight 0: it says nothing, and costs a model. Give it a weight, or drop it."
            said.append(Advice("idle", text, (name,)))
        elif rate.value < IDLE:
            text = (
                f"{name} changes nothing on these prompts: it is active on {rate} of the tokens, and costs a model. "
                "Drop it, or ask what it is for."
            )
            said.append(Advice("idle", text, (name,)))
        elif rate.low > EVERYWHERE and len(found.active) > 1:
            text = (
                f"{name} differs from the base on {rate} of the tokens: more a style than a skill. A lower weight "
                "leaves the others room."
            )
            said.append(Advice("everywhere", text, (name,)))
    return said
