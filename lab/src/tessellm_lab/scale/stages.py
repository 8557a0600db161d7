"""Training stack after stack with a deadline: what is done is kept, what was stopped goes on in the next call.

Long stacks are stored on the way (see `state`). Short stacks are not stopped: those that would not end in time are left
for the next call. A stack that breaks on a GPU is told of and trained again without its graph, update by update; if it
breaks again, it is left unfinished.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from time import monotonic

from ..common.devices import checked
from ..common.finite import TrainingError, check_copies
from ..common.folders import state_folder
from ..common.stopwatch import Stopwatch
from .measure import held_out_scores, measure
from .state import Rows, State
from .training import Stack, Trainer, advance

LONG = 100_000  # steps from which on a stack is stored on the way
POINTS = 30  # of a long stack's curve
TRIAL = 300  # steps by which short stacks' time is estimated
Log = Callable[[str], None]


def train_stacks(wanted: list[Stack], folder: Path, device: str, deadline: float, log: Log) -> State:
    """Train what is not trained yet, as far as time allows."""
    state = State(folder)
    if any(map(state.begun, wanted)):
        log(f"going on from {folder}; remove it to begin anew")
    else:
        state.stopwatch = Stopwatch()  # what is here, if anything, is of other stacks
    if any(state.rows(stack) is None for stack in wanted):
        check_copies(checked(device))
        state_folder(folder)
    for together in groups(wanted, device):
        left = [stack for stack in together if state.rows(stack) is None]
        if left and monotonic() < deadline:
            train = _train_long if left[0].steps >= LONG else _train_short
            for stack in train([Trainer(stack, device) for stack in left], state, deadline, log):
                log(f"{stack.name}: again, without a graph")
                train([Trainer(stack, device, as_graph=False)], state, deadline, log)
    return state


def groups(wanted: list[Stack], device: str) -> list[list[Stack]]:
    """Neighbours that train side by side; on a CPU every stack is alone."""
    if device == "cpu":
        return [[stack] for stack in wanted]
    named = groupby(enumerate(wanted), key=lambda pair: (pair[1].beside or pair[0], pair[1].steps))
    return [[stack for _, stack in members] for _, members in named]


def _train_short(trainers: list[Trainer], state: State, deadline: float, log: Log) -> list[Stack]:
    """Stacks that broke and may be tried again."""
    steps, began, broken = trainers[0].stack.steps, monotonic(), []
    for target in sorted({min(TRIAL, steps), steps}):
        for trainer in trainers:
            trainer.prepare()
        since, before = monotonic(), trainers[0].steps
        while trainers:
            try:
                advance(trainers, target)
                break
            except TrainingError as error:
                broken += _dropped(trainers, state, error, log)
        needed = (monotonic() - since) / (target - before) * (steps - target)
        if not trainers or (needed and monotonic() + needed > deadline):
            names = ", ".join(trainer.stack.name for trainer in trainers)
            log(f"{names}: {needed:.0f} s more needed; left for the next call" if names else "none of these is left")
            return broken
    for trainer in trainers:
        _finish(trainer, [], state, log, began)
    return broken


def _train_long(trainers: list[Trainer], state: State, deadline: float, log: Log) -> list[Stack]:
    """As `_train_short`, of one stack, from where an earlier call stopped."""
    (trainer,), began = trainers, monotonic()
    steps, pause = trainer.stack.steps, max(1, trainer.stack.steps // POINTS)
    curve = state.resume(trainer)
    in_time = True
    while in_time and trainer.steps < steps:
        try:
            in_time = trainer.advance(min(steps, (trainer.steps // pause + 1) * pause), deadline)
        except TrainingError as error:
            return _dropped(trainers, state, error, log)
        curve.append({"step": trainer.steps, "held_out": held_out_scores(trainer)})
        state.stop(trainer, curve)
        log(f"{trainer.stack.name}, step {trainer.steps}: held out {curve[-1]['held_out']}")
    if in_time:
        _finish(trainer, curve, state, log, began)
    return []


def _finish(trainer: Trainer, curve: Rows, state: State, log: Log, began: float) -> None:
    try:
        rows = measure(trainer)
    except TrainingError as error:
        _dropped([trainer], state, error, log)
        return
    for number, row in enumerate(rows):
        row["curve"] = [[point["step"], point["held_out"][number]] for point in curve]
    state.finish(trainer.stack, rows)
    scores = ", ".join(f"{row['held_out']['score']:.3f}" for row in rows)
    log(f"{trainer.stack.name}: {len(rows)} runs, done {monotonic() - began:.0f} s after its start; held out {scores}")


def _dropped(trainers: list[Trainer], state: State, error: TrainingError, log: Log) -> list[Stack]:
    """Take the broken ones out of the list, keep what broke; those that may be tried another way."""
    log(str(error))
    state.note(str(error))
    gone = [trainer for trainer in trainers if trainer.is_broken()]
    trainers[:] = [trainer for trainer in trainers if trainer not in gone]
    return [trainer.stack for trainer in gone if trainer.as_graph]
