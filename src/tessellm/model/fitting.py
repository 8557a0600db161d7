"""Whether a rule's parameters are those of the members that it is to combine: a rule may come from a file that was
edited, or from another composition. Knows rules and numbers of members, no files."""

from __future__ import annotations

from ..errors import RecipeError
from ..rules import Rule
from ..rules.belief import Belief

LARGEST_HABIT = 1e6  # nats and their logarithms; beyond, sums are no numbers
LONGEST_OPENING = 1 << 13  # tokens of a chat template before a prompt


def check_fit(rule: Rule, experts: int, vocab_size: int) -> None:
    """Refuse habits of other experts, and tokens that are not in the vocabulary."""
    if not isinstance(rule, Belief):
        return
    if len(rule.habits) not in (0, experts):
        raise _unfit(f"expected the habits of {experts} experts; got those of {len(rule.habits)}")
    if any(abs(number) > LARGEST_HABIT for expert in rule.habits for number in expert):
        raise _unfit(f"expected habits within ±{LARGEST_HABIT:g}")
    if len(rule.opening) > LONGEST_OPENING:
        raise _unfit(f"expected an opening of at most {LONGEST_OPENING} tokens; got {len(rule.opening)}")
    wrong = next((token for token in (*rule.opening, *rule.turn) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise _unfit(f"expected tokens from 0 to {vocab_size - 1} in its opening and turn; got {wrong}")


def _unfit(why: str) -> RecipeError:
    return RecipeError(f"the rule {Belief.name!r} does not fit these members: {why}. Compose them again")
