"""An earlier hand-over rule, kept for comparison: evidence, refuted claims and novelty, with one owner at every step.

    S evidence of the run, F refuted claims; D_m = KL(p_m‖p_b), H_m entropy, N_m = Σ p_m log(p_m / max_{l≠m} p_l)
    claimants C = {D_m > κ}; none: the expert with the largest D speaks
    one that is unrefuted (F ≤ θ) and sure (H < h1): it speaks
    else among {D_m > ρ·max D} with S within θ of the best, the largest N/(h0 + H) speaks
    observe x: l_m = max(log p_m(x), −8); if all agree within a, S = F = 0;
               else S += l, and if two claimed F += max_C l − l

`tessellm_lab.evidence` differs in three ways: a sole claim is not believed against the evidence once the members have
been seen to interfere, a base that most members contradict is not a reference, and compatible claims blend.
"""

import torch
from torch import Tensor

THETA, AGREE, KAPPA, H0, H1, RHO, FLOOR = 2.0, 0.25, 0.001, 0.3, 0.1, 0.01, -8.0


def novelty_rule(logp_MBTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """The rule over whole sequences: [B, T, V]."""
    members, batch, steps, _ = logp_MBTV.shape
    prob = logp_MBTV.exp()
    divergence = (prob * (logp_MBTV - logp_MBTV[:1])).sum(-1)
    entropy = -(prob * logp_MBTV).sum(-1)
    top, index = logp_MBTV.topk(2, 0)
    member = torch.arange(members, device=logp_MBTV.device).view(-1, 1, 1, 1)
    novelty = (prob * (logp_MBTV - torch.where(member == index[:1], top[1:], top[:1]))).sum(-1)
    score = novelty / (H0 + entropy)
    divergence[0] = 0
    evidence, refuted = torch.zeros_like(divergence[:, :, 0]), torch.zeros_like(divergence[:, :, 0])
    claimed = torch.zeros_like(evidence, dtype=torch.bool)
    speakers = []
    for t in range(steps):
        if t:
            at = tokens_BT[None, :, t, None].expand(members, batch, 1)
            said = logp_MBTV[:, :, t - 1].gather(-1, at)[..., 0].clamp_min(FLOOR)
            agreed = said.amax(0) - said.amin(0) < AGREE
            best = said.masked_fill(~claimed, -torch.inf).amax(0)
            miss = torch.where(claimed & (claimed.sum(0) > 1), best - said, 0.0)
            evidence = torch.where(agreed, 0.0, evidence + said)
            refuted = torch.where(agreed, 0.0, refuted + miss)
        now = divergence[:, :, t]
        claimed = now > KAPPA
        loudest = now.argmax(0, keepdim=True)
        sure = (refuted.gather(0, loudest) <= THETA) & (entropy[:, :, t].gather(0, loudest) < H1)
        alone = (claimed.sum(0) == 0) | ((claimed.sum(0) == 1) & sure[0])
        heard = (now > RHO * now.amax(0)).index_fill(0, loudest.new_zeros(1), False)
        lead = evidence.masked_fill(~heard, -torch.inf).amax(0)
        trusted = heard & (evidence >= lead - THETA)
        chosen = score[:, :, t].masked_fill(~trusted, -torch.inf).argmax(0)
        speakers.append(torch.where(alone, loudest[0], chosen))
    at = torch.stack(speakers, 1)[None, ..., None].expand(1, *logp_MBTV.shape[1:])
    return logp_MBTV.gather(0, at)[0]
