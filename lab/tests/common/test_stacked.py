"""Stacked members are ordinary models: the same logits as transformers, and training that never mixes them."""

import pytest
import torch

from tessellm_lab.common.finite import TrainingError, check_copies
from tessellm_lab.common.stacked import Shape, initialise, logits, select, to_llama, train
from tessellm_lab.common.stacked_gpt2 import initialise_gpt2, logits_gpt2, to_gpt2
from tessellm_lab.common.steps import Steps

SHAPE = Shape(vocabulary=13, width=32, layers=2, heads=2, context=16)


def shaken(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}


def test_a_member_is_a_llama():
    params = shaken(initialise(SHAPE, 3, torch.Generator().manual_seed(0)))
    tokens = torch.randint(13, (2, 9))
    with torch.no_grad():
        alone = to_llama(params, SHAPE, 1)(tokens).logits
    torch.testing.assert_close(logits(params, SHAPE, tokens.expand(3, -1, -1))[1], alone, atol=1e-4, rtol=1e-4)


def test_a_member_is_a_gpt2():
    params = shaken(initialise_gpt2(SHAPE, 3, torch.Generator().manual_seed(0)))
    tokens = torch.randint(13, (2, 9))
    with torch.no_grad():
        alone = to_gpt2(params, SHAPE, 2)(tokens).logits
    torch.testing.assert_close(logits_gpt2(params, SHAPE, tokens.expand(3, -1, -1))[2], alone, atol=1e-4, rtol=1e-4)


def test_training_together_is_training_alone():
    start = initialise(SHAPE, 2, torch.Generator().manual_seed(0))
    text = torch.randint(13, (2, 4, 10), generator=torch.Generator().manual_seed(2))
    inputs, targets, mask = text[..., :-1], text[..., 1:], torch.ones(2, 4, 9)
    together = train(start, SHAPE, lambda: (inputs, targets, mask), steps=5, lr=1e-3)
    alone = train(select(start, [1]), SHAPE, lambda: (inputs[1:], targets[1:], mask[1:]), steps=5, lr=1e-3)
    for name, value in alone.items():
        torch.testing.assert_close(together[name][1], value[0], atol=1e-5, rtol=1e-4)


def test_a_single_step_has_the_full_rate():
    start = initialise(SHAPE, 1, torch.Generator().manual_seed(0))
    text = torch.randint(13, (1, 4, 10), generator=torch.Generator().manual_seed(2))
    batch = text[..., :-1], text[..., 1:], torch.ones(1, 4, 9)
    once = train(start, SHAPE, lambda: batch, steps=1, lr=1e-3)
    constant = train(start, SHAPE, lambda: batch, steps=1, lr=1e-3, constant=True)
    assert not torch.equal(once["head"], start["head"])
    assert all(torch.equal(once[name], constant[name]) for name in start)


def test_copies_that_arrive_changed_are_told(monkeypatch: pytest.MonkeyPatch):
    check_copies("cpu")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor + (len(tensor) > 2**12))
    with pytest.raises(TrainingError, match="copies of 65536 bytes from cpu arrive changed"):
        check_copies("cpu")


def test_a_member_that_breaks_is_named_with_its_update():
    start = initialise(SHAPE, 3, torch.Generator().manual_seed(0))
    text = torch.randint(13, (3, 4, 10), generator=torch.Generator().manual_seed(2))
    drawn = iter(range(9))

    def batch() -> tuple[torch.Tensor, ...]:
        mask = torch.ones(3, 4, 9)
        mask[1] *= torch.nan if next(drawn) == 3 else 1
        return text[..., :-1], text[..., 1:], mask

    with pytest.raises(TrainingError, match=r"finite: member 1 broke at update 4 \(parameters not finite now: embed, "):
        train(start, SHAPE, batch, steps=8, lr=1e-3)


def test_parameters_that_the_last_update_broke_are_named():
    start = initialise(SHAPE, 2, torch.Generator().manual_seed(0))
    text = torch.randint(13, (2, 4, 10), generator=torch.Generator().manual_seed(2))

    def loss(params: dict[str, torch.Tensor], inputs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        zero = 0 * params["head"].flatten(1).sum(1)
        return (zero + torch.tensor([0.0, 1.0])).clamp(min=0).sqrt()  # finite, with an infinite slope at zero

    with pytest.raises(TrainingError, match=r"finite: member 0 broke at update 1 .*now: head\)$"):
        train(start, SHAPE, lambda: (text[..., :-1], text[..., 1:], torch.ones(2, 4, 9)), steps=1, lr=1e-3, loss=loss)


def test_steps_that_were_reached_are_kept(capsys: pytest.CaptureFixture[str]):
    start = initialise(SHAPE, 1, torch.Generator().manual_seed(0))
    text = torch.randint(13, (1, 2, 6), generator=torch.Generator().manual_seed(2))
    batch = (text[..., :-1], text[..., 1:], torch.ones(1, 2, 5))
    for seconds, reached in ((None, 5), (1e-9, 1)):
        steps = Steps("base", 5, print)
        train(start, SHAPE, lambda: batch, steps.planned, 1e-3, steps, seconds=seconds)
        assert steps.kept() == {"reached": reached, "planned": 5}
        assert f"base: step {reached} of 5, loss" in capsys.readouterr().out
