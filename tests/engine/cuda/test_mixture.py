"""The kernels that mix say what the operations say. They run here in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1 (make test-kernels), or on a GPU", allow_module_level=True)

from tessellm.engine.cuda import mixture
from tessellm.engine.cuda.passes import Mixed

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # −∞ − −∞, which is not used


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pieces of a vocabulary, and of few tokens."""
    for name, value in (("PIECES", ((8, 4), (64, 2))), ("FEW_PIECES", 1), ("BLOCK", 64), ("MEMBER_BLOCK", 64)):
        monkeypatch.setattr(mixture, name, value)


def case(members: int, rows: int, vocabulary: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Logits, log π with components left out, and how often members count: lone ones, Eq. 2, weights of both signs."""
    draw = torch.Generator().manual_seed(seed)
    x_MBV = 3 * torch.randn(members, rows, vocabulary, generator=draw)
    prior_BL = torch.rand(rows, members + 1, generator=draw) * (torch.rand(rows, members + 1, generator=draw) < 0.6)
    prior_BL[0] = 0
    prior_BL[0, 1] = 1.0  # a lone expert
    prior_BL[1:, -1] += 0.3
    weight_BK = torch.tensor([1.0, 0.5, -0.4, 0.0])[torch.randint(4, (rows, members - 1), generator=draw)]
    count_BM = torch.cat([1 - weight_BK.sum(1, keepdim=True), weight_BK], 1)
    return list(x_MBV[:, :, None]), (prior_BL / prior_BL.sum(-1, keepdim=True)).log(), count_BM


@pytest.mark.parametrize(("members", "rows", "vocabulary"), [(2, 1, 70), (3, 5, 300), (6, 9, 130), (9, 70, 65)])
@pytest.mark.parametrize("impossible", [False, True])
def test_mixing(members: int, rows: int, vocabulary: int, impossible: bool) -> None:
    logits_M, log_pi_BL, count_BM = case(members, rows, vocabulary, members)
    if impossible:  # for an expert, and for the base
        logits_M[1][:, :, 5:9] = logits_M[0][:, :, 7:12] = -torch.inf
    wanted = Mixed(logits_M, log_pi_BL, count_BM)
    found = mixture.KernelMixed(logits_M, log_pi_BL, count_BM)
    loose = 1e-2 if impossible else 1e-4  # sums over impossible tokens are of 10⁵
    torch.testing.assert_close(found.logp_BV, wanted.logp_BV, atol=loose, rtol=1e-3)
    for one, other in zip(found.best(), wanted.best(), strict=True):
        torch.testing.assert_close(one, other, atol=loose, rtol=1e-4)
    token_B = torch.arange(rows) % 12 + 12
    torch.testing.assert_close(found.loglik(token_B), wanted.loglik(token_B), atol=10 * loose, rtol=1e-3)
    assert not found.nonfinite_BM.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_of_a_member_that_is_left_out_changes_nothing(value: float) -> None:
    logits_M, log_pi_BL, count_BM = case(3, 4, 100, 0)
    plain = mixture.KernelMixed([logits.clone() for logits in logits_M], log_pi_BL, count_BM)
    log_pi_BL[1] = torch.tensor([0.5, 0.5, 0.0, 0.0]).log()
    log_pi_BL[2] = torch.tensor([0.5, 0.0, 0.5, 0.0]).log()
    count_BM[1:3] = torch.tensor([1.0, 0.0, 0.0])
    logits_M[2][1:3, 0, 3] = value
    found, wanted = mixture.KernelMixed(logits_M, log_pi_BL, count_BM), Mixed(logits_M, log_pi_BL, count_BM)
    assert found.best()[1].isnan().tolist() == [False, False, True, False]
    assert wanted.best()[1].isnan().tolist() == [False, False, True, False]
    assert torch.equal(found.nonfinite_BM, wanted.nonfinite_BM)
    torch.testing.assert_close(found.best()[1][[0, 3]], plain.best()[1][[0, 3]])
