"""Examples: what the classifier learns, and what it leaves alone."""

from __future__ import annotations

import torch

from tessellm.routing.examples import ExampleClassifier, classifier_input

EXPERTS = 3


def points(center: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Energies and vectors of prompts around a place of their own."""
    generator = torch.Generator().manual_seed(seed)
    energy_NFK = torch.randn(count, 2, EXPERTS, generator=generator)
    vector_ND = torch.nn.functional.normalize(torch.randn(count, 8, generator=generator) * 0.2 + center, dim=-1)
    return classifier_input(energy_NFK, [vector_ND])


def fitted() -> ExampleClassifier:
    sign = torch.tensor([1.0, -1.0] * 4)
    examples = torch.cat([points(sign, 4, 1), points(-sign, 4, 2)])
    return ExampleClassifier.fit(points(torch.ones(8), 60, 0), examples, torch.tensor([0] * 4 + [2] * 4), EXPERTS)


def test_prompts_like_an_experts_examples_have_odds_for_it() -> None:
    sign = torch.tensor([1.0, -1.0] * 4)
    classifier = fitted()
    assert (classifier.odds(points(sign, 10, 7))[:, 0] > 0).all()
    assert (classifier.odds(points(-sign, 10, 8))[:, 2] > 0).all()
    assert (classifier.odds(points(torch.ones(8), 10, 9)) <= 0).all()


def test_experts_without_examples_have_no_odds() -> None:
    classifier = fitted()
    assert classifier.known_K.tolist() == [True, False, True]
    assert not classifier.odds(points(torch.ones(8), 5, 3))[:, 1].any()
    assert not classifier.odds_PK[:, 1].any()


def test_the_odds_of_calibration_prompts_come_from_fits_without_them() -> None:
    classifier = fitted()
    seen_PK = classifier.odds(points(torch.ones(8), 60, 0))
    assert classifier.odds_PK.shape == seen_PK.shape
    assert classifier.odds_PK[:, [0, 2]].mean() > seen_PK[:, [0, 2]].mean()


def test_a_fit_is_repeatable() -> None:
    torch.testing.assert_close(fitted().weight_DC, fitted().weight_DC, rtol=0, atol=0)
