"""Every experiment by name, and how to run one. A module has `run(seed, out, size, log)` and hands back a Result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessellm.errors import TessellmError, nearest

from .claims import Result
from .folders import results_folder
from .threads import one_thread

SIZES = ("cpu", "full")
EXPERIMENTS_PACKAGE = __package__.rpartition(".")[0]


@dataclass(frozen=True)
class Experiment:
    """`paper` says what of the first paper it checks, and `--all` runs those that do; the others are ours, or the
    second paper's."""

    module: str
    summary: str
    paper: str = ""
    all_cores: bool = False  # its models are large enough to gain from more threads than one


EXPERIMENTS = {
    "theorems": Experiment(
        "theorems.experiment",
        "the paper's definitions and theorems, exactly, on random families",
        "Definitions 1–5, Theorems 1–3, Lemma 1, Eq. 5",
    ),
    "letters": Experiment(
        "letters.experiment",
        "letter replacement, the paper's form and as generation, lengths 1 to 31",
        "App. C.1; Theorem 1",
    ),
    "styles": Experiment(
        "styles.experiment",
        "both experts act on every token, in different features of it",
        "Theorem 3, and where Eq. 2 is not its C",
    ),
    "lengths": Experiment(
        "lengths.experiment",
        "trained at 16, tested to 8 times that: what the composition inherits",
        "Sec. 3, length",
    ),
    "trig": Experiment(
        "trig.experiment",
        "trigonometric proofs that need two and three experts, every step checked",
        "Sec. 1 and 3.2; Definitions 3 and 4, Theorem 2",
    ),
    "task-arithmetic": Experiment(
        "task_arithmetic.experiment",
        "composed outputs against merged weights as fine-tuning goes on",
        "Definition 5, Eq. 5",
    ),
    "many-experts": Experiment(
        "letters.many_experts", "letters with 1 to 13 experts: where Eq. 2 collapses, and what does not"
    ),
    "skills": Experiment("skills.experiment", "chains of skills, each by its own expert, in four training regimes"),
    "blending": Experiment("styles.blending", "which rules still compose content and style on the same token"),
    "endings": Experiment("skills.endings", "members that end differently: who may stop"),
    "scale": Experiment("scale.experiment", "one network on many combinations: when it masters those it never saw"),
    "neurons": Experiment("neurons.experiment", "weights built from the teacher: how many neurons the tasks need"),
    "bridge": Experiment(
        "bridge.experiment", "one model trained on more combinations, or experts that saw none, composed"
    ),
    "images": Experiment(
        "images.experiment", "pictures of known parts: do layers announce the combinations that fail?"
    ),
    "prediction": Experiment(
        "prediction.experiment", "the diagnosis on unlabelled prompts against measured accuracy, over 200 compositions"
    ),
    "table": Experiment(
        "table.experiment",
        "the paper's table in miniature: members trained here, merges beside, judged by lm-eval and evalplus",
    ),
    "real": Experiment(
        "real.experiment",
        "real adapters of a real model on real tasks: rules against merges, Arrow and a router",
        all_cores=True,
    ),
    "routing": Experiment(
        "proving.experiment",
        "prompts of twenty skills to twenty adapters: ours beside other routers, with and without examples",
        all_cores=True,
    ),
    "written": Experiment(
        "proving.written",
        "what a composition of twenty adapters writes, as a share of the right expert's own score",
        all_cores=True,
    ),
    "two-skills": Experiment(
        "proving.two_skills",
        "prompts that concern two skills: the mixture against either expert and Eq. 2 of both",
        all_cores=True,
    ),
    "full-tunes": Experiment(
        "proving.full_tunes", "full fine-tunes trained here, routed as adapters are", all_cores=True
    ),
    "rule-cost": Experiment("rule_cost.experiment", "what the default rule costs beside Eq. 2, at Gemma's shapes"),
}


def chosen(name: str | None, everything: bool) -> list[str]:
    """The experiments that were asked for."""
    if everything == (name is not None):
        raise TessellmError("expected the name of one experiment, or --all; --list names them")
    if name is not None and name not in EXPERIMENTS:
        raise TessellmError(f"unknown experiment {name!r}; {nearest(name, EXPERIMENTS)}")
    return [each for each, experiment in EXPERIMENTS.items() if experiment.paper] if name is None else [name]


def check_size(size: str) -> None:
    if size not in SIZES:
        raise TessellmError(f"unknown size {size!r}; expected one of {', '.join(SIZES)}")


def run_experiment(name: str, seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Run one experiment; NAME.json and its figures are in `out` afterwards. Hands back what NAME.json holds."""
    check_size(size)
    module: Any = importlib.import_module(f"{EXPERIMENTS_PACKAGE}.{EXPERIMENTS[name].module}")
    single = size == "cpu" and not EXPERIMENTS[name].all_cores
    with results_folder(out), one_thread() if single else nullcontext():
        made = module.run(seed, out, size, log)
        return made.write(out) if isinstance(made, Result) else made
