"""`task-arithmetic`: merged and composed by hand, ages are kept, and a short run goes through."""

import json

import torch

from tessellm.rules import product
from tessellm_lab.common.stacked import select
from tessellm_lab.task_arithmetic import experiment as task_arithmetic
from tessellm_lab.task_arithmetic.members import PAIRS, before, fine_tune, merged, strings, tables, train_base


def seeded():
    return torch.Generator().manual_seed(0)


def test_pairs_are_disjoint():
    letters = "".join(PAIRS)
    assert len(set(letters)) == len(letters) == 12


def test_eq_2_of_linear_softmaxes_is_eq_5():
    maps = torch.randn(4, 6, 5, generator=seeded(), dtype=torch.float64)
    inputs = torch.randn(7, 5, generator=seeded(), dtype=torch.float64)
    assert task_arithmetic.softmax_difference(maps, inputs) < 1e-12


def test_one_expert_merged_is_that_expert_and_ages_grow():
    generator = seeded()
    base = train_base(2, 4, generator)
    ages = fine_tune(base, (0, 1, 3), 4, 1e-3, generator)
    for name, start in base.items():
        assert torch.equal(ages[0][name], start.expand_as(ages[0][name]))
        torch.testing.assert_close(merged(base, ages[3], [2])[name], select(ages[3], [2])[name], rtol=0, atol=1e-6)
    moved = [sum(float((ages[age][n] - base[n]).abs().sum()) for n in base) for age in (0, 1, 3)]
    assert moved[0] == 0 < moved[1] < moved[2]


def test_the_ideal_is_the_owners_law():
    generator = seeded()
    base = train_base(2, 4, generator)
    experts = fine_tune(base, (2,), 4, 1e-2, generator)[2]
    texts = strings(5, generator)
    found = task_arithmetic.outputs(base, experts, 3, texts)
    letter = before(texts)[:, 1:]
    for expert, table in enumerate(tables(PAIRS[:3]), 1):
        acts = table[letter] != letter
        assert torch.equal(found.ideal_BTV[acts], found.members_MBTV[expert][acts])
        assert torch.equal(found.wanted_BT[acts], table[letter][acts])
    idle = found.owner_BT == 0
    assert torch.equal(found.ideal_BTV[idle], found.members_MBTV[0][idle])
    torch.testing.assert_close(found.composed_BTV, product(found.members_MBTV))


def test_a_short_run_writes_claims_and_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(task_arithmetic.SIZES, "cpu", task_arithmetic.Effort(3, (1, 3), 4, 6))
    monkeypatch.setattr(task_arithmetic, "FAMILIES", 5)
    result = task_arithmetic.run(seed=0, out=tmp_path, size="cpu")
    written = json.loads((tmp_path / "task-arithmetic.json").read_text())
    by_id = {claim["id"]: claim for claim in written["claims"]}
    assert by_id["linear"]["holds"]
    assert by_id["linear-softmax"]["holds"]
    assert [row["age"] for row in result.tables["as fine-tuning goes on"]] == [1, 1, 1, 3, 3, 3]
    assert (tmp_path / "task-arithmetic.png").stat().st_size > 10_000
