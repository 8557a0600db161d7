"""How much the constants of the rule `belief` matter: each is changed alone, the others stay as they are.

Works on what benchmarks/belief_numbers.py stored of development texts, so that trying a constant takes a second. What
counts is the share of prompts that begin with another law than their expert's, the share of prompts that concern no
expert which are left to the base, and the nats of reference answers over the expert's own. Beside the real texts one
synthetic suite, letters by two experts, where there is no template and SHARE alone plays a part.

Writes results/belief-constants.json and .png. Run: python benchmarks/belief_constants.py FOLDER

Shapes: P prompts, K experts, L laws, T time, N numbers of an expert.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from belief_numbers import PLAIN, USUAL
from tessellm.experiments.lab.claims import Claim, Result
from tessellm.experiments.lab.panels import COLOURS, FAINT, caption, drawn, panels, save
from tessellm.model import habits
from tessellm.rules import belief

RESULTS = Path(__file__).resolve().parent.parent / "results"
Heard = tuple[Tensor, Tensor, Tensor]
Stored = Mapping[str, Sequence[Heard]]
SPAN = "span"
VALUES: dict[str, tuple[float, ...]] = {
    "SHARE": (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2),
    "COMMIT": (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999),
    "BASE": (1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 4.0),
    SPAN: (32, 64, 96, 128, 192, 256),
}
UNITS = (
    1.0,
    2.0,
    3.0,
    4.5,
    6.0,
)  # by which sums of deviations deviate on usual prompts, the base's score along with it
NOW = {"SHARE": belief.SHARE, "COMMIT": belief.COMMIT, "BASE": belief.BASE, SPAN: belief.Belief.span}
TITLES = {
    "SHARE": "share of the belief that goes back to all laws",
    "COMMIT": "share that goes to the likeliest law at first",
    "BASE": "score of the base and of Eq. 2",
    SPAN: "positions that are averaged",
}
PANELS = (
    ("BASE", "astray", "prompts astray, %"),
    (SPAN, "astray", "prompts astray, %"),
    ("BASE", "plain to the base", "plain prompts left to the base, %"),
    ("SHARE", "nats", "nats over the expert's, %, worst skill"),
    ("COMMIT", "nats", "nats over the expert's, %, worst skill"),
    ("SHARE", "right", "letters: strings wholly right, %"),
)
LETTERS, LETTER_STRINGS = (800, 300), 4  # steps of the base and of each expert; strings per length


@contextmanager
def constants(**changed: float) -> Iterator[None]:
    """The rule's own code with other constants."""
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(patch.object(habits if name == "SPREAD" else belief, name, value))
        yield


def numbers(heard: Sequence[Heard], span: int) -> Tensor:
    """The five numbers of each expert where the answer begins: [P, K, N]."""
    return torch.stack([torch.cat([averaged[-span:].mean(0), now], -1) for averaged, now, _ in heard])


def scores(stored: Stored, span: int) -> dict[str, Tensor]:
    """How far each expert acts beyond its habits on the prompts of each kind: [P, K]."""
    known = habits.habits_of(numbers(stored[USUAL], span))
    rule = belief.Belief(known.tolist(), (), (0,))
    others = {kind: numbers(heard, span)[:, None] for kind, heard in stored.items() if kind != USUAL}
    return {kind: rule.beyond(each).sum(-1)[:, 0] for kind, each in others.items()}


def nats(prior_PL: Tensor, heard: Sequence[Tensor]) -> float:
    """Of all answers together, by the rule's own mixture and its own Bayes."""
    total, belief_PL = 0.0, prior_PL
    said_TPL = torch.nn.utils.rnn.pad_sequence(list(heard))  # padding: all laws say 1, which costs and tells nothing
    for said_PL in said_TPL:
        total -= float(torch.logsumexp(belief_PL + said_PL, -1).sum())
        belief_PL = belief.shared(belief_PL + said_PL)
    return total


def measured(stored: Stored, span: int = belief.Belief.span, **changed: float) -> dict[str, float]:
    """What one training's experts come to with these constants."""
    with constants(**changed):
        score = scores(stored, span)
        priors = {kind: belief.prior(each[:, None], True)[:, 0] for kind, each in score.items()}
        skills = [kind for kind in priors if kind != PLAIN]
        astray = {skill: int((priors[skill].argmax(-1) != law).sum()) for law, skill in enumerate(skills, 1)}
        found = {f"astray {skill}": float(count) for skill, count in astray.items()}
        found["astray"] = sum(astray.values()) / sum(len(priors[skill]) for skill in skills)
        sure = torch.cat([priors[skill].exp().amax(-1) >= 0.9 for skill in skills])
        found["first law below .9"] = 1 - float(sure.float().mean())
        found["plain to the base"] = float((priors[PLAIN].argmax(-1) % (len(skills) + 1) == 0).float().mean())
        for law, skill in enumerate(skills, 1):
            heard = [said_TL for _, _, said_TL in stored[skill]]
            if not all(map(len, heard)):
                continue
            found[f"nats {skill}"] = (
                nats(priors[skill], heard) / -sum(float(said_TL[:, law].sum()) for said_TL in heard) - 1
            )
    found["nats"] = max((value for name, value in found.items() if name.startswith("nats ")), default=float("nan"))
    return found


def rows(stored: Mapping[str, Stored], name: str) -> list[dict[str, Any]]:
    """A constant's values, and what each training comes to with them."""
    table = []
    for value in VALUES[name]:
        changed = {"span": int(value)} if name == SPAN else {name: value}
        table.append({"value": value, "trainings": {seed: measured(each, **changed) for seed, each in stored.items()}})
    return table


def units(stored: Mapping[str, Stored]) -> list[dict[str, Any]]:
    """The unit of scores, which is no constant: the base's score is in it too, and the same laws are believed."""
    table = []
    for unit in UNITS:
        changed = {"SPREAD": unit, "BASE": belief.BASE * unit / habits.SPREAD}
        table.append({"value": unit, "trainings": {seed: measured(each, **changed) for seed, each in stored.items()}})
    return table


def letters(seed: int) -> list[dict[str, Any]]:
    """The share of strings of 1 to 31 letters that two experts and their base write wholly right, by SHARE."""
    from tessellm.compose import compose
    from tessellm.experiments.lab.stacked_gpt2 import to_gpt2
    from tessellm.experiments.letters import writing
    from tessellm.experiments.letters.positions import REPLACEMENTS

    generator = torch.Generator().manual_seed(seed)
    trained = writing.train_members(1, LETTERS, 16, generator)
    base, one, two = (to_gpt2(trained, writing.SHAPE, member) for member in range(len(REPLACEMENTS)))
    model = compose(base, {"one": one, "two": two}, rule="belief")
    lengths_B = torch.arange(1, writing.FIELD + 1).repeat_interleave(LETTER_STRINGS)
    strings_BN = writing.random_strings(lengths_B, generator)
    wanted_BT, table = writing.answers(strings_BN, REPLACEMENTS), []
    for value in VALUES["SHARE"]:
        with constants(SHARE=value), torch.no_grad():
            right_B = (writing.write(model, writing.fields(strings_BN)) == wanted_BT).all(1)
        table.append({"value": value, "right": float(right_B.float().mean())})
    return table


def figure(tables: Mapping[str, Any], out: Path) -> str:
    """What depends on a constant at all, a line per training: who is believed first does not depend on SHARE and
    COMMIT, nats hardly on BASE and span."""
    shown, axes = panels(3, width=4.2, height=2.9, rows=2)
    for ax, (name, measure, label) in zip(axes, PANELS, strict=True):
        lines = {f"training {seed}": [cell["trainings"][seed] for cell in tables[name]] for seed in tables["texts"]}
        for number, (title, cells) in enumerate(
            ({"letters": tables["letters"]} if measure == "right" else lines).items()
        ):
            values = [100 * cell[measure] for cell in cells]
            ax.plot(VALUES[name], values, marker="o", ms=3, color=COLOURS[number], label=title)
        ax.axvline(NOW[name], color=FAINT, lw=1, ls="--")
        ax.set_ylim(0, 6 if measure in ("astray", "nats") else 100)
        if name == "SHARE":
            ax.set_xscale("log")
        caption(ax, TITLES[name], name, label)
    axes[0].legend(fontsize=7, frameon=False)
    return save(shown, out, "belief-constants")


def claims_of(tables: Mapping[str, Any]) -> list[Claim]:
    claims = []
    for name in VALUES:
        near = [cell for cell in tables[name] if cell["value"] in beside(name)]
        for measure, what in (("astray", "share of prompts astray"), ("nats", "nats over the expert's, worst skill")):
            found = [run[measure] for cell in near for run in cell["trainings"].values()]
            text = f"{name} from {beside(name)[0]:g} to {beside(name)[-1]:g}: {what}, least and most of all trainings"
            claims.append(Claim(f"{name}-{measure}", text, [round(min(found), 4), round(max(found), 4)]))
    same = {tuple(round(run["astray"], 6) for run in cell["trainings"].values()) for cell in tables["unit"]}
    text = "the unit of scores from 1 to 6, the base's score with it: the same prompts go astray"
    claims.append(Claim("unit", text, len(same) == 1, "True", len(same) == 1))
    right = [cell["right"] for cell in tables["letters"]]
    text = f"letters by two experts: share of strings wholly right, SHARE from {VALUES['SHARE'][0]:g} to .01"
    return [*claims, Claim("letters", text, [round(min(right), 4), round(max(right), 4)])]


def beside(name: str) -> tuple[float, ...]:
    """A constant's value and its neighbours."""
    at = VALUES[name].index(NOW[name])
    return VALUES[name][max(0, at - 1) : at + 2]


def main() -> None:
    began, folder = time.perf_counter(), Path(sys.argv[1])
    torch.set_num_threads(1)
    stored = {path.stem: torch.load(path) for path in sorted(folder.glob("*.pt"))}
    tables: dict[str, Any] = {name: rows(stored, name) for name in VALUES}
    tables |= {"unit": units(stored), "letters": letters(0)}
    tables["texts"] = {seed: {kind: len(heard) for kind, heard in each.items()} for seed, each in stored.items()}
    figures = drawn(lambda: figure(tables, RESULTS))
    seconds = time.perf_counter() - began
    Result("belief-constants", claims_of(tables), 0, "cpu", seconds, figures, tables).write(RESULTS)


if __name__ == "__main__":
    main()
