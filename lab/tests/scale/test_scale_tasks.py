"""The families of tasks, their supports and their encodings are what they say."""

from __future__ import annotations

import pytest
import torch

from tessellm.errors import TessellmError
from tessellm_lab.scale import encodings, grid, tasks
from tessellm_lab.scale.grid import PreferenceGrid
from tessellm_lab.scale.measure import decode
from tessellm_lab.scale.teacher import Hyperteacher

from scale_cases import drawn


def test_masks_and_splits_have_the_papers_sizes() -> None:
    masks = tasks.all_masks(16, 3)
    assert len(masks) == 696
    train, held = tasks.split(masks, "random", 0.25, 0)
    assert (len(train), len(held)) == (522, 174)
    small = tasks.all_masks(8, 3)
    sizes = {name: len(tasks.split(small, name, 0.25, 0)[0]) for name in tasks.SUPPORTS}
    assert sizes == {
        "random": 69, "equal": 69, "popular": 69, "unpopular": 65, "disconnected": 28, "non_compositional": 63,
    }  # fmt: skip


@pytest.mark.parametrize("support", tasks.SUPPORTS)
def test_supports_are_what_they_say(support: str) -> None:
    masks = tasks.all_masks(8, 3)
    train, held = tasks.split(masks, support, 0.25, 3)
    both = {tuple(mask) for mask in torch.cat([train, held]).tolist()}
    assert len(both) == len(train) + len(held)
    counts = train.sum(0)
    assert tasks.is_connected(train) == (support not in ("disconnected", "non_compositional"))
    if support == "equal":
        assert counts.max() - counts.min() <= 1
    if support == "popular":
        assert counts[0] == masks[:, 0].sum()
    if support == "unpopular":
        assert counts[-1] == 2
    if support == "non_compositional":
        assert counts[-1] == 0
        assert held[:, -1].all()


def test_few_masks_still_cover_every_module_or_it_says_that_they_cannot() -> None:
    train, _ = tasks.split(tasks.all_masks(8, 3), "random", 0.9, 0)
    assert len(train) == 10
    assert tasks.is_connected(train)
    with pytest.raises(TessellmError, match="connects all 8 modules"):
        tasks.split(tasks.all_masks(8, 3), "random", 0.98, 0)
    with pytest.raises(TessellmError, match="did you mean 'popular'"):
        tasks.split(tasks.all_masks(4, 2), "populer", 0.25, 0)


def test_latents_are_where_they_should_be() -> None:
    mask = tasks.all_masks(6, 3)
    assert torch.equal(tasks.latents(mask, "khot", drawn()), mask.float())
    z = tasks.latents(mask, "discrete", drawn())
    assert {round(v, 4) for v in z.unique().tolist()} == {0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
    z = tasks.latents(mask, "continuous", drawn())
    assert torch.equal(z > 0, mask)
    assert z[mask].min() >= 0.5
    assert z.max() < 1


def test_the_teacher_is_its_formula() -> None:
    teacher = Hyperteacher.random([5], 3, 2, 4, "cpu")
    z, x = torch.tensor([0.5, 0.0, 0.9]), torch.randn(4, generator=drawn())
    w = sum(z[m] / 2**0.5 * teacher.theta_EMNH[0, m] for m in range(3))
    b = sum(z[m] / 2**0.5 * teacher.beta_EMH[0, m] for m in range(3))
    slow = teacher.omega_EHO[0].T @ torch.relu(x @ w + b)
    assert torch.allclose(teacher.answer(z[None, None], x[None, None, None])[0, 0, 0], slow, atol=1e-6)
    perfect = teacher.draw(z[None, None], drawn())[1]
    assert teacher.score(perfect, perfect)["score"].item() == 1
    means = perfect.mean(2, keepdim=True).expand_as(perfect)
    assert teacher.score(means, perfect)["score"].item() == pytest.approx(0, abs=1e-4)


def slow_values(objects: list[int], rewards: list[float]) -> dict[tuple[int, int], list[float]]:
    """The expert's action values by plain recursion over (cell, taken) for eight backups."""
    to = grid.neighbours(torch.device("cpu")).tolist()
    value = {(c, u): 0.0 for c in range(len(grid.FREE)) for u in range(grid.SETS)}
    for _ in range(grid.BACKUPS):
        q = {}
        for c, u in value:
            q[c, u] = [0.0]
            for action in range(1, 5):
                new = to[action][c]
                gain, taken = 0.0, u
                if new in objects and not u >> objects.index(new) & 1:
                    gain, taken = rewards[objects.index(new)], u | 1 << objects.index(new)
                q[c, u].append(gain + grid.DISCOUNT * value[new, taken])
        value = {state: max(values) for state, values in q.items()}
    return q


def test_the_grids_expert_plans_exactly() -> None:
    assert len(grid.FREE) == 19
    objects, rewards = [3, 7, 11, 18], [1.0, -0.5, 0.8, 2.0]
    q_BUCA, _, _ = grid.plan(torch.tensor([objects]), torch.tensor([rewards]))
    for (cell, taken), values in slow_values(objects, rewards).items():
        assert torch.allclose(q_BUCA[0, taken, cell], torch.tensor(values), atol=1e-5)


def test_the_grids_episodes_follow_the_expert() -> None:
    family = PreferenceGrid.random([0], 4, 16, "cpu")
    episodes = family.episodes(64, drawn())
    assert all(len({*row}) == 4 for row in episodes.object_cell_BK.tolist())
    hated = torch.full((64, 4), -1.0)
    _, actions = family.follow(episodes, hated)
    assert (actions[:, 0] == 0).all()  # nothing is worth it: stay, which ends
    assert (actions[:, 1:] == -1).all()
    seen, actions = family.follow(episodes, torch.ones(64, 4))
    assert seen.shape == (64, 8, family.inputs)
    assert torch.allclose(seen.square().mean(-1), torch.ones(64, 8), atol=1e-5)
    assert (actions[:, 0] > 0).all()
    features = seen.unflatten(-1, (49, 18))[..., :16]
    left = (features > 0).flatten(2).sum(-1)  # objects of one feature on one cell count once: cells are distinct
    assert (left[:, 0] == 4).all()
    assert (left[:, -1] < 4).any()
    output = torch.nn.functional.one_hot(actions.clamp(min=0), 5).float()[None]
    assert family.score(output, actions[None])["whole"].item() == 1


@pytest.mark.parametrize("name", [*encodings.ENCODINGS, *encodings.BENT])
def test_encodings_tell_tasks_apart(name: str) -> None:
    z = tasks.latents(tasks.all_masks(6, 3).repeat(3, 1), "discrete", drawn()).unique(dim=0)
    code = encodings.encoding(name, 6, 0, "cpu")(z)
    assert code.shape == (len(z), encodings.width_of(name, 6, 4, 4))
    distance = torch.cdist(code, code) + torch.eye(len(z))
    assert distance.min() > 1e-3
    assert torch.equal(code, encodings.encoding(name, 6, 0, "cpu")(z))


def decodable(name: str, seed: int) -> float:
    z = tasks.latents(tasks.all_masks(16, 3)[torch.randperm(696, generator=drawn())], "discrete", drawn(1))
    code = encodings.encoding(name, 16, seed, "cpu")(z)
    return decode(code[:522], z[:522], code[522:], z[522:], torch.zeros(16, dtype=torch.bool))["held_out"]


def test_how_linear_encodings_are_is_what_the_page_says() -> None:
    """The invertible network hardly bends z, with larger weights it does; how far shuffled intervals are from it, the
    permutation decides."""
    assert min(decodable("invertible", seed) for seed in range(10)) > 0.99
    half, bent = (decodable(name, 0) for name in encodings.BENT)
    assert bent < 0.4 < half < 0.6
    shuffled = [decodable("interval_shuffle", seed) for seed in range(10)]
    assert shuffled[0] < 0.01
    assert max(shuffled) > 0.85


def test_language_and_interval_shuffle_are_their_formulas() -> None:
    z = torch.tensor([[0.0, 0.6, 1.0]])
    words = encodings.encoding("language", 3, 0, "cpu")(z)[0] * 10
    assert words.round().int().tolist() == [1, 4, 2, 10, 3, 14]
    shuffled = encodings.encoding("interval_shuffle", 3, 0, "cpu")(torch.linspace(0.001, 0.999, 1000)[:, None])
    back = shuffled.sort(0).values
    assert torch.allclose(back[:, 0], torch.linspace(0.001, 0.999, 1000), atol=2e-3)
    assert not torch.allclose(shuffled, back)
