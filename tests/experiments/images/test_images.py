"""The judge knows its templates, models learn what they are shown, and the probe looks into real pipelines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tessellm.diagnose.labelled import Labelled
from tessellm.errors import MemberError
from tessellm.experiments.images import experiment, scenes
from tessellm.experiments.images.flow import REPORTS, Flow


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_judge_knows_every_picture_even_under_noise() -> None:
    every = torch.arange(len(scenes.combinations())).repeat(2)
    assert len(every) == 2 * 6 * 6 * 4
    pictures = scenes.pictures(every, drawn())
    assert pictures.min() == -1
    assert pictures.max() == 1
    assert torch.equal(scenes.judge(pictures), every)
    noisy = pictures + 0.3 * torch.randn(pictures.shape, generator=drawn(1))
    assert (scenes.judge(noisy) == every).float().mean() > 0.98
    static = scenes.judge(torch.randn(200, scenes.PIXELS, generator=drawn(2)))
    assert (static == torch.arange(200) % 144).float().mean() < 0.1


def test_pictures_show_what_they_are_told() -> None:
    row = [scenes.prompt(c) for c in scenes.combinations()].index("a blue ring, bottom left")
    picture = scenes.templates()[row, 4].view(12, 12, 3)  # no jitter
    ink = (picture[..., 2] == 1) & (picture[..., :2] == -1).all(-1)
    assert int(ink.sum()) == 12
    assert ink[7:11, 1:5].sum() == 12
    assert scenes.one_hot(torch.tensor([row])).sum() == 3


def test_splits_hold_every_part_and_nest_by_seed() -> None:
    for share in experiment.HELD_OUT:
        train, held = experiment.split(share, 3)
        assert len(held) == int(share * 144)
        parts = scenes.combinations()[train[: experiment.PROBE_COMBINATIONS]]
        assert [len(parts[:, n].unique()) for n in range(3)] == list(scenes.SIZES)
    few, many = experiment.split(0.9, 3)[0], experiment.split(0.25, 3)[0]
    assert set(few.tolist()) <= set(many.tolist())


def test_a_model_learns_its_combinations_and_is_alone_in_its_stack() -> None:
    flow = Flow(128, 2, updates=900, rows=64)
    trained = torch.tensor([0, 30, 77, 140])
    said: list[str] = []
    params = flow.train([trained, torch.tensor([5, 60, 99, 120])], 0, "cpu", said.append)
    assert len(said) == REPORTS
    pictures, hidden = flow.sample(params, trained.repeat(8).expand(2, -1), drawn())
    right = [(scenes.judge(pictures[n]) == trained.repeat(8)).float().mean().item() for n in range(2)]
    assert right[0] > 0.7
    assert right[1] < 0.4  # the other model never saw these
    assert hidden.shape == (2, 32, 128)


def test_the_probe_reads_what_is_there_and_not_what_is_not() -> None:
    order = torch.randperm(144, generator=drawn(7))
    fit_on, test_on = order[:40].repeat(6), order[40:].repeat(2)
    mix = torch.randn(sum(scenes.SIZES), 40, generator=drawn())

    def features(on: torch.Tensor, seed: int) -> torch.Tensor:
        return scenes.one_hot(on) @ mix + 0.1 * torch.randn(len(on), 40, generator=drawn(seed))

    parts = scenes.combinations()[fit_on]
    assert all(len(parts[:, n].unique()) == size for n, size in enumerate(scenes.SIZES))
    read = experiment.probe(features(fit_on, 1), fit_on, features(test_on, 2), test_on)
    assert read.float().mean() > 0.9
    assert experiment.probe_across(features(test_on, 2), test_on, order[40:]) > 0.9
    assert experiment.probe_across(torch.randn(len(test_on), 40, generator=drawn(3)), test_on, order[40:]) < 0.4
    shuffled = experiment.probe(features(fit_on, 1), fit_on, features(test_on, 2), test_on, shuffle=0)
    assert shuffled.float().mean() < 0.5


def test_the_experiment_runs_at_a_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = dataclasses.replace(experiment.SIZES["cpu"], flows=(Flow(16, 1, updates=5, rows=8),), samples=2)
    monkeypatch.setitem(experiment.SIZES, "cpu", toy)
    monkeypatch.setattr(experiment, "PROBE_SAMPLES", 2)
    content = experiment.run(0, tmp_path, "cpu", lambda text: None).write(tmp_path)
    assert len(content["tables"]["models"]) == 12
    assert {claim["id"] for claim in content["claims"]} >= {
        "correlation",
        "correlation-across",
        "within",
        "shuffled",
        "random-weights",
        "across-16",
    }
    assert (tmp_path / "images.png").is_file()


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole Stable Diffusion pipeline, made here: real classes, random weights, a few thousand parameters."""
    diffusers = pytest.importorskip("diffusers")
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = [*"abcdefghijklmnopqrstuvwxyz ,"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=32)
    torch.manual_seed(0)
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": len(tokens) - 1}
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, **ends,
        )
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        latent_channels=4, norm_num_groups=4, sample_size=8,
    )  # fmt: skip
    made = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer, unet=unet, scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def prompts(count: int) -> list[Labelled]:
    chosen = scenes.combinations()[torch.randperm(144, generator=drawn())[:count]]
    return [Labelled(scenes.prompt(c), {"colour": scenes.CONSTITUENTS["colour"][int(c[1])]}) for c in chosen]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_real_pipeline_is_probed_by_module_name(pipe: Any) -> None:
    from tessellm.experiments.images.pipelines import pipeline_features, probe_pipeline

    call = {"num_inference_steps": 2, "height": 8, "width": 8}
    texts = [example.text for example in prompts(6)]
    layers = ["unet.mid_block", "text_encoder.*final_layer_norm"]
    guided = pipeline_features(pipe, texts, layers, batch_size=4, guidance_scale=5.0, **call)
    assert {tuple(x.shape) for x in guided.values()} == {(6, 16)}
    one_by_one = pipeline_features(pipe, texts, layers, batch_size=1, guidance_scale=5.0, **call)
    for name, rows in guided.items():
        assert torch.allclose(rows, one_by_one[name], atol=1e-4), name
        assert rows.std(0).max() > 0  # the prompt, or the noise, shows
    found = probe_pipeline(pipe, prompts(24), ["unet.mid_block"], guidance_scale=1.0, batch_size=12, folds=3, **call)
    assert [(row.layer, row.label) for row in found] == [("unet.mid_block", "colour")]
    assert 0 <= found[0].score.value <= 1
    with pytest.raises(MemberError, match=r"has no layer 'unet\.middle'"):
        pipeline_features(pipe, texts, ["unet.middle"], **call)
