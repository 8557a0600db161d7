"""Which members answer: the one that holds half of the prior, else the base and the likeliest others."""

from __future__ import annotations

import pytest

from tessellm.routing.route import Route


def route(**prior: float) -> Route:
    return Route(prior, max(prior, key=lambda name: prior[name]))


def test_a_member_with_half_of_the_prior_answers_alone():
    assert route(base=0.2, math=0.7, sql=0.1).active() == ("math",)
    assert route(base=0.5, math=0.4, sql=0.1).active() == ("base",)


def test_in_doubt_the_base_and_the_likeliest_answer():
    prior = {"base": 0.05, "math": 0.4, "sql": 0.35, "bash": 0.12, "code": 0.08}
    assert route(**prior).active() == ("base", "math", "sql", "bash")
    assert route(**prior).active(most=2) == ("base", "math")
    assert route(**prior).active(alone=0.4) == ("math",)


def test_a_route_among_some_experts_shares_out_the_others_prior():
    whole = Route({"base": 0.1, "math": 0.6, "sql": 0.3}, "math", {"math": 2.0, "sql": 1.0}, 0.5)
    found = whole.among(["sql", "new"])
    assert found.prior == pytest.approx({"base": 0.25, "sql": 0.75, "new": 0.0})
    assert (found.selected, found.scores, found.threshold) == ("sql", {"sql": 1.0}, 0.5)
    assert found.active() == ("sql",)
    silenced = Route({"base": 0.0, "math": 1.0, "sql": 0.0}, "math").among(["sql"])
    assert (silenced.prior, silenced.selected) == ({"base": 1.0, "sql": 0.0}, "base")


@pytest.mark.parametrize(
    "prior", [{"base": 0.0}, {"base": float("nan")}, {"base": 2.0, "math": -1.0}, {"base": float("inf")}]
)
def test_a_prior_that_is_none_is_refused(prior):
    with pytest.raises(ValueError, match="a prior is made of numbers from 0 to 1"):
        Route(prior, "base").among(["math"])
