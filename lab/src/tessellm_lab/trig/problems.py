"""Problems for the provers of `proofs`, their split, and each prover as a language model of proofs.

A problem is made of chunks: a pair for an identity, expanded or factored or nested; a chain, whose second identity
applies only after the first was used; plain algebra. Train and test problems never share a skeleton (the left side with
its numbers blanked out).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from .expressions import FUNCTIONS, MARKS, NUMBERS, Sum, Term, marked, parse, skeleton, sum_of, tokens
from .proofs import COLON, DOT, EQUALS, IDENTITIES, PROVE, Proof, prove, redexes, step

VOCABULARY = (PROVE, COLON, EQUALS, DOT, "+", "(", ")", *MARKS, *FUNCTIONS, *NUMBERS)
NAMES = tuple(IDENTITIES)
TEST_SHARE = 5  # one skeleton in so many is for tests
LONGEST_LINE = 28
MOST_PAIRS = 3


def random_problem(needs: frozenset[str], rng: random.Random, test: bool) -> Proof:
    """A problem that needs exactly these identities, from the train or the test skeletons."""
    while True:
        left = marked(Sum(tuple(term for chunk in _chunks(needs, rng) for term in chunk)))
        if is_test(left) != test or not _small(left):
            continue
        proof = prove(left, frozenset(NAMES))
        if proof is not None and proof.needs == needs and len(proof.lines) > 1 and all(map(_small, proof.lines)):
            return proof


def bystander_problem(needed: str, bystander: str, rng: random.Random) -> Proof:
    """A training problem that needs one identity; a pair of another stands in it from the left side to the goal."""
    while True:
        chunks = [*_chunks(frozenset([needed]), rng), _pair(bystander, rng)]
        rng.shuffle(chunks)
        left = marked(Sum(tuple(term for chunk in chunks for term in chunk)))
        if is_test(left) or not _small(left):
            continue
        proof, idle = prove(left, frozenset([needed])), prove(left, frozenset())
        if proof is None or len(proof.lines) < 2 or not all(map(_small, proof.lines)):
            continue
        if set(redexes(proof.right)) == {bystander} and (idle is None or idle.right != proof.right):
            return proof


def is_test(left: Sum) -> bool:
    return hashlib.sha256(skeleton(left).encode()).digest()[0] % TEST_SHARE == 0


def _small(line: Sum) -> bool:
    words = tokens(line)
    return len(words) <= LONGEST_LINE and all(word in VOCABULARY for word in words)


def _chunks(needs: frozenset[str], rng: random.Random) -> list[list[Term]]:
    wanted, chunks = sorted(needs), []
    wanted += rng.choices(wanted, k=rng.randint(0, MOST_PAIRS - len(wanted))) if wanted else []
    rng.shuffle(wanted)
    if NAMES[0] in wanted and len(needs) > 1 and rng.random() < 0.5:
        second = next(name for name in wanted if name != NAMES[0])
        chunks.append(_chain(second, rng))
        wanted.remove(NAMES[0])
        wanted.remove(second)
    chunks += [_pair(name, rng) for name in wanted]
    least, most = (0, 1) if len(needs) > 1 else (0, 4) if needs else (2, 5)
    chunks += [rng.choice(FILLERS)(rng) for _ in range(rng.randint(least, most))]
    rng.shuffle(chunks)
    return chunks


def _pair(name: str, rng: random.Random) -> list[Term]:
    """n a + n b, perhaps after some algebra, or n ( a + b ), or m ( n ( a + b ) + k )."""
    one, other = IDENTITIES[name][0].terms
    factor, shape = rng.randint(1, 9), rng.random()
    if shape < 0.5:
        return [*_delayed(Term(factor, one.body), rng), *_delayed(Term(factor, other.body), rng)]
    inside = Term(factor, sum_of(one, other))
    if shape < 0.85:
        return [inside]
    return [Term(rng.randint(2, 3), sum_of(inside, _number(rng, 5)))]


def _delayed(term: Term, rng: random.Random) -> list[Term]:
    """n a, or what algebra makes n a of: k ( m a ) with km = n, j ( k ( m a ) ), which takes it a line more, as long as
    a chain does, or p a + q a with p + q = n."""
    factor, shape = term.factor, rng.random()
    if shape < 0.3:
        inner = _wrapped(term, rng)
        return [_wrapped(inner, rng) if shape < 0.15 else inner]
    if shape < 0.45 and factor > 1:
        part = rng.randint(1, factor - 1)
        return [Term(part, term.body), Term(factor - part, term.body)]
    return [term]


def _wrapped(term: Term, rng: random.Random) -> Term:
    """k ( m a ) for n a, with km = n."""
    inner = rng.choice([m for m in range(1, term.factor + 1) if term.factor % m == 0])
    return Term(term.factor // inner, sum_of(Term(inner, term.body)))


def _chain(second: str, rng: random.Random) -> list[Term]:
    """n ( sin² + cos² ) + n tan²: the second identity applies once the first has made the 1 that it needs."""
    factor = rng.randint(1, 9)
    last = IDENTITIES[second][0].terms[1]
    return [Term(factor, IDENTITIES[NAMES[0]][0]), *_delayed(Term(factor, last.body), rng)]


def _plain(rng: random.Random) -> list[Term]:
    """Numbers to add, like terms to collect, a product to unwrap."""
    shape = rng.random()
    if shape < 0.4:
        return [_number(rng, 9), _number(rng, 9)]
    function = rng.choice(FUNCTIONS)
    if shape < 0.7:
        return [Term(rng.randint(2, 9), function), Term(rng.randint(2, 9), function)]
    return [Term(rng.randint(2, 5), sum_of(Term(rng.randint(2, 5), function)))]


def _near_miss(rng: random.Random) -> list[Term]:
    """3 sin² + 5 cos², 4 ( 1 + 2 tan² ), 7 sec² + 7 cos², 2 ( 1 + sin² ): looks like an identity, must be left alone.

    Without these every function in a training problem would belong to its one identity, and a member could learn what
    the whole problem is about in place of looking at the term.
    """
    first, second = rng.sample(range(1, 10), 2)
    shape = rng.random()
    if shape < 0.6:
        one, other = IDENTITIES[rng.choice(NAMES)][0].terms
        if shape < 0.35:
            return [Term(first, one.body), Term(second, other.body)]
        return [Term(first, sum_of(one, Term(rng.randint(2, 3), other.body)))]
    one, other = rng.choice(STRANGERS)
    return [Term(first, sum_of(one, other))] if shape < 0.8 else [Term(first, one.body), Term(first, other.body)]


_PAIRS = [(Term(1, a), Term(1, b)) for a, b in itertools.permutations((None, *FUNCTIONS), 2)]
STRANGERS = [(a, b) for a, b in _PAIRS if not {sum_of(a, b), sum_of(b, a)} & {left for left, _ in IDENTITIES.values()}]
FILLERS = (_plain, _near_miss)


def _number(rng: random.Random, largest: int) -> Term:
    return Term(rng.randint(1, largest))


@dataclass(frozen=True)
class Prover:
    """A prover as a language model: the next word of a proof, whoever wrote the words before."""

    known: frozenset[str]

    def next_word(self, words: Sequence[str]) -> str:
        """The word after a prompt and some of a proof. Text that is no proof is answered with the end."""
        colon = list(words).index(COLON)
        equals = list(words).index(EQUALS)
        left, right = parse(words[1:equals]), parse(words[equals + 1 : colon])
        lines = _lines(words[colon + 1 :])
        before = parse(lines[-2]) if len(lines) > 1 else left
        if lines and self._ended(before, lines[-1]):
            return DOT if parse(lines[-1]) == right else EQUALS
        if not lines:
            return EQUALS
        return self._continue(before, lines[-1])

    def candidates(self, before: Sum) -> list[list[str]]:
        """This prover's next line, with any of the places it does not know rewritten by others, fewest first."""
        met = redexes(before)
        foreign = [place for place, name in enumerate(met) if name not in self.known]
        subsets = itertools.chain.from_iterable(
            itertools.combinations(foreign, size) for size in range(len(foreign) + 1)
        )
        return [tokens(step(before, self.known, frozenset(subset))) for subset in subsets]

    def _ended(self, before: Sum, written: list[str]) -> bool:
        """Is the line that is being written a whole one, as far as this prover can tell?"""
        fitting = [line for line in self.candidates(before) if line[: len(written)] == written]
        return bool(fitting) and len(fitting[0]) == len(written)

    def _continue(self, before: Sum, written: list[str]) -> str:
        for line in self.candidates(before):
            if len(line) > len(written) and line[: len(written)] == written:
                return line[len(written)]
        return DOT


def _lines(words: Sequence[str]) -> list[list[str]]:
    """The lines after the colon, the last perhaps unfinished; a fresh '=' starts an empty one."""
    lines: list[list[str]] = []
    for word in words:
        if word == EQUALS:
            lines.append([])
        elif lines:
            lines[-1].append(word)
    return lines
