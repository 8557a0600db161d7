"""Expressions and identities for the laws of trig."""

from hypothesis import settings
from hypothesis import strategies as st

from tessellm_lab.trig.expressions import FUNCTIONS, Sum, Term, parse
from tessellm_lab.trig.problems import NAMES

ALL = frozenset(NAMES)
kinds = st.sets(st.sampled_from(NAMES)).map(frozenset)
plain = st.builds(Term, st.integers(1, 60), st.none() | st.sampled_from(FUNCTIONS))
sums = st.recursive(
    st.lists(plain, min_size=1, max_size=3).map(lambda terms: Sum(tuple(terms))),
    lambda inner: st.lists(plain | st.builds(Term, st.integers(1, 9), inner), min_size=1, max_size=3).map(
        lambda terms: Sum(tuple(terms))
    ),
    max_leaves=6,
)
quick = settings(max_examples=60, deadline=None)


def line(words: str) -> Sum:
    return parse(words.split())
