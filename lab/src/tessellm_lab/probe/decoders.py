"""Linear decoders of labels from rows of features: ridge for numbers, multinomial logistic for names.

Scores come from examples that the decoder did not see, and how strongly it is held back is chosen inside each fold's
own training rows. Tensors only: nothing here knows a model.

Shapes: N row, D feature, R rank, J problem (a label, or a shuffled copy of it), F inner fold, C class, G penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FOLDS, INNER_FOLDS = 5, 3
RIDGE_PENALTIES = tuple(10.0**power for power in range(-5, 5))  # a row, on features of variance 1
LOGISTIC_PENALTIES = tuple(10.0**power for power in range(0, -4, -1))  # strongest first: each starts from the last
MOST_ITERATIONS = 100
RESAMPLES = 1000


@dataclass(frozen=True)
class Score:
    """How well a label is read off held-out rows: R² of a number, share right of a name; 95 % interval."""

    value: float
    low: float
    high: float
    chance: float  # of a decoder that sees no features: 0 for R², else the share right of the commonest name


def ridge(x_ND: Tensor, y_NJ: Tensor, penalties: Sequence[float]) -> Tensor:
    """Minimisers of ‖y − xw‖² + penalty ‖w‖², without a constant, by one singular value decomposition: [G, D, J]."""
    u_NR, s_R, v_RD = torch.linalg.svd(x_ND, full_matrices=False)
    uy_RJ = u_NR.T @ y_NJ
    shrink_GR = torch.stack([s_R / (s_R.square() + penalty) for penalty in penalties])
    return v_RD.T @ (shrink_GR[:, :, None] * uy_RJ)


def logistic(
    x_NR: Tensor, y_JN: Tensor, weight_JN: Tensor, start_JRC: Tensor, penalty_J: Tensor, tolerance: float = 1e-5
) -> Tensor:
    """Minimisers of the mean cross-entropy + penalty/2 ‖w‖² of J problems on the same rows, each with its own labels,
    row weights (0 leaves a row out) and penalty: [J, R+1, C], the last row the constants, not penalised."""
    rows_NR = torch.cat([x_NR, torch.ones_like(x_NR[:, :1])], 1)
    w_JRC = start_JRC.clone().requires_grad_()
    share_JN = weight_JN / weight_JN.sum(1, keepdim=True)
    optimiser = torch.optim.LBFGS(
        [w_JRC], max_iter=MOST_ITERATIONS, history_size=10, tolerance_grad=tolerance,
        tolerance_change=1e-2 * tolerance, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        optimiser.zero_grad()
        logp_JNC = torch.einsum("nr,jrc->jnc", rows_NR, w_JRC).log_softmax(-1)
        nll_JN = -logp_JNC.gather(-1, y_JN[..., None])[..., 0]
        total = (share_JN * nll_JN).sum() + (penalty_J / 2 * w_JRC[:, :-1].square().sum((1, 2))).sum()
        total.backward()
        return total

    optimiser.step(loss)
    return w_JRC.detach()


def folds_of(groups_N: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """A fold for every row, about equally many groups in each; rows of one group share their fold."""
    _, group_N = torch.unique(groups_N, return_inverse=True)
    count = int(group_N.max()) + 1
    fold_of_group = (torch.arange(count) % folds)[torch.randperm(count, generator=generator)]
    return fold_of_group[group_N.cpu()].to(groups_N.device)


def predict_numbers(x_ND: Tensor, y_NJ: Tensor, groups_N: Tensor, folds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Held-out predictions of J numbers a row, and the training rows' mean beside each: both [N, J]."""
    predicted_NJ, mean_NJ = torch.empty_like(y_NJ), torch.empty_like(y_NJ)
    for train_N, inner_N, generator in _outer(groups_N, folds, seed):
        x_NR, rotate = _whitened(x_ND[train_N])
        y, mean_J = y_NJ[train_N] - y_NJ[train_N].mean(0), y_NJ[train_N].mean(0)
        inner = folds_of(inner_N, INNER_FOLDS, generator)
        error_GJ = torch.zeros(len(RIDGE_PENALTIES), y.shape[1], dtype=y.dtype, device=y.device)
        for fold in range(INNER_FOLDS):
            kept, left = inner != fold, inner == fold
            centre_R, centre_J = x_NR[kept].mean(0), y[kept].mean(0)
            w_GRJ = ridge(x_NR[kept] - centre_R, y[kept] - centre_J, _a_row(int(kept.sum())))
            error_GJ += ((x_NR[left] - centre_R) @ w_GRJ + centre_J - y[left]).square().sum(1)
        w_GRJ = ridge(x_NR, y, _a_row(len(y)))
        best_J = error_GJ.argmin(0)
        w_RJ = w_GRJ.gather(0, best_J.expand(1, w_GRJ.shape[1], -1))[0]
        predicted_NJ[~train_N] = rotate(x_ND[~train_N]) @ w_RJ + mean_J
        mean_NJ[~train_N] = mean_J
    return predicted_NJ, mean_NJ


def predict_names(
    x_ND: Tensor, y_JN: Tensor, classes: int, groups_N: Tensor, folds: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Held-out predictions of J names a row, and the training rows' commonest name beside each: both [J, N]."""
    predicted_JN, commonest_JN = torch.empty_like(y_JN), torch.empty_like(y_JN)
    for train_N, inner_N, generator in _outer(groups_N, folds, seed):
        x_NR, rotate = _whitened(x_ND[train_N])
        y_Jn = y_JN[:, train_N]
        inner = folds_of(inner_N, INNER_FOLDS, generator)
        kept_FN = torch.stack([inner != fold for fold in range(INNER_FOLDS)])
        labels, weights = y_Jn.repeat_interleave(INNER_FOLDS, 0), kept_FN.repeat(len(y_Jn), 1).to(x_NR.dtype)
        w = torch.zeros(len(labels), x_NR.shape[1] + 1, classes, dtype=x_NR.dtype, device=x_NR.device)
        nll_GJ = []
        for penalty in LOGISTIC_PENALTIES:
            w = logistic(x_NR, labels, weights, w, torch.full_like(weights[:, 0], penalty))
            logp = (torch.einsum("nr,jrc->jnc", x_NR, w[:, :-1]) + w[:, -1:]).log_softmax(-1)
            nll = -logp.gather(-1, labels[..., None])[..., 0] * (1 - weights)
            nll_GJ.append(nll.sum(1).view(len(y_Jn), INNER_FOLDS).sum(1))
        best_J = torch.tensor(LOGISTIC_PENALTIES, dtype=x_NR.dtype, device=x_NR.device)[torch.stack(nll_GJ).argmin(0)]
        everyone = torch.ones_like(y_Jn, dtype=x_NR.dtype)
        w_JRC = logistic(x_NR, y_Jn, everyone, torch.zeros_like(w[: len(y_Jn)]), best_J)
        logits_JNC = torch.einsum("nr,jrc->jnc", rotate(x_ND[~train_N]), w_JRC[:, :-1]) + w_JRC[:, -1:]
        predicted_JN[:, ~train_N] = logits_JNC.argmax(-1)
        counts_JC = functional.one_hot(y_Jn, classes).sum(1)
        commonest_JN[:, ~train_N] = counts_JC.argmax(-1)[:, None]
    return predicted_JN, commonest_JN


def score_numbers(predicted_N: Tensor, mean_N: Tensor, y_N: Tensor, groups_N: Tensor, seed: int) -> Score:
    """R² against the training rows' mean."""
    lost, spread = (y_N - predicted_N).square(), (y_N - mean_N).square()
    value, low, high = _resampled(lost, spread, groups_N, seed)
    return Score(1 - value, 1 - high, 1 - low, 0.0)


def score_names(predicted_N: Tensor, commonest_N: Tensor, y_N: Tensor, groups_N: Tensor, seed: int) -> Score:
    """Share right."""
    right = (predicted_N == y_N).double()
    value, low, high = _resampled(right, torch.ones_like(right), groups_N, seed)
    return Score(value, low, high, (commonest_N == y_N).double().mean().item())


def _a_row(rows: int) -> list[float]:
    return [penalty * rows for penalty in RIDGE_PENALTIES]


def _outer(groups_N: Tensor, folds: int, seed: int) -> Iterator[tuple[Tensor, Tensor, torch.Generator]]:
    """Training rows of every fold, their groups, and a generator for what is drawn inside the fold."""
    generator = torch.Generator().manual_seed(seed)
    fold_N = folds_of(groups_N, folds, generator)
    for fold in range(folds):
        train_N = fold_N != fold
        yield train_N, groups_N[train_N], generator


def _whitened(x_ND: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows with every feature at mean 0 and variance 1, turned into the basis that they span, which changes no decoder
    whose penalty is a norm; and the function that does the same to other rows."""
    mean_D, std_D = x_ND.mean(0), x_ND.std(0, unbiased=False)
    scale_D = torch.where(std_D > 1e-8 * std_D.max().clamp(min=1e-30), std_D, torch.inf)
    _, s_R, v_RD = torch.linalg.svd((x_ND - mean_D) / scale_D, full_matrices=False)
    v_DR = v_RD[s_R > 1e-9 * s_R[0]].T

    def rotate(rows_ND: Tensor) -> Tensor:
        return (rows_ND - mean_D) / scale_D @ v_DR

    return rotate(x_ND), rotate


def _resampled(part_N: Tensor, whole_N: Tensor, groups_N: Tensor, seed: int) -> tuple[float, float, float]:
    """Σ part / Σ whole, and its 95 % interval over groups drawn anew."""
    _, group_N = torch.unique(groups_N, return_inverse=True)
    count = int(group_N.max()) + 1
    sums = torch.zeros(count, 2, dtype=torch.float64).index_add_(
        0, group_N.cpu(), torch.stack([part_N, whole_N], 1).double().cpu()
    )
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    part, whole = sums[drawn].sum(1).unbind(1)
    ratio = (part / whole.clamp(min=1e-300)).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    total = sums.sum(0)
    return (total[0] / total[1].clamp(min=1e-300)).item(), ratio[0].item(), ratio[1].item()
