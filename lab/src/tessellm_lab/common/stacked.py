"""Many small Llama-style transformers in one computation: the members of a benchmark, trained side by side.

Parameters carry a leading member axis and every matrix product is batched over it, so a hundred members train
in one run. Members never mix: the loss is a sum over members, hence each gets exactly its own gradient, and
`to_llama` turns any one of them into an ordinary `LlamaForCausalLM`. Knows nothing of tasks, only token ids.

Shapes: E member, B batch, T time, D width, F feed-forward width, H head, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .finite import Watch, check

Params = dict[str, Tensor]
EPSILON = 1e-6
ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """The architecture of one member."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int = 64

    @property
    def hidden(self) -> int:
        return 8 * ((8 * self.width // 3 + 7) // 8)


def initialise(shape: Shape, members: int, generator: torch.Generator) -> Params:
    """Random parameters for `members` independent members."""
    device = generator.device

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(members, *size, generator=generator, device=device) * std

    width, hidden = shape.width, shape.hidden
    params = {"embed": normal(shape.vocabulary, width), "head": normal(width, shape.vocabulary)}
    params["norm"] = torch.ones(members, width, device=device)
    out_std = 0.02 / (2 * shape.layers) ** 0.5
    for layer in range(shape.layers):
        params[f"{layer}.attend_norm"] = torch.ones(members, width, device=device)
        params[f"{layer}.qkv"] = normal(width, 3 * width)
        params[f"{layer}.out"] = normal(width, width, std=out_std)
        params[f"{layer}.feed_norm"] = torch.ones(members, width, device=device)
        params[f"{layer}.gate_up"] = normal(width, 2 * hidden)
        params[f"{layer}.down"] = normal(hidden, width, std=out_std)
    return params


def rms_norm(x_EBTD: Tensor, gain_ED: Tensor) -> Tensor:
    x = x_EBTD.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    return (x * gain_ED[:, None, None]).to(x_EBTD.dtype)


def mix(x_EBTD: Tensor, weight_EDF: Tensor) -> Tensor:
    """One linear map a member."""
    e, b, t, d = x_EBTD.shape
    return torch.bmm(x_EBTD.reshape(e, b * t, d), weight_EDF.to(x_EBTD.dtype)).view(e, b, t, -1)


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_TD + torch.cat((-second, first), -1) * sin_TD


def attend(x_EBTD: Tensor, params: Params, layer: int, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    e, b, t, d = x_EBTD.shape
    qkv = mix(x_EBTD, params[f"{layer}.qkv"]).view(e * b, t, 3, heads, d // heads)
    q, k, v = (part.squeeze(2).transpose(1, 2) for part in qkv.split(1, 2))  # [E·B, H, T, D/H]
    o = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
    return mix(o.transpose(1, 2).reshape(e, b, t, d), params[f"{layer}.out"])


def logits(
    params: Params,
    shape: Shape,
    tokens_EBT: Tensor,
    dtype: torch.dtype = torch.float32,
    hidden: list[Tensor] | None = None,
) -> Tensor:
    """[E, B, T, V], computed in `dtype` and returned in float32; `hidden` collects the layers' outputs [E, B, T, D]."""
    steps, size = tokens_EBT.shape[-1], shape.width // shape.heads
    device = tokens_EBT.device
    frequency = ROPE_BASE ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(steps, device=device, dtype=torch.float32), frequency).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = mix(functional.one_hot(tokens_EBT, shape.vocabulary).to(dtype), params["embed"])
    for layer in range(shape.layers):
        x = x + attend(rms_norm(x, params[f"{layer}.attend_norm"]), params, layer, shape.heads, cos, sin)
        gate, up = mix(rms_norm(x, params[f"{layer}.feed_norm"]), params[f"{layer}.gate_up"]).chunk(2, -1)
        x = x + mix(functional.silu(gate) * up, params[f"{layer}.down"])
        if hidden is not None:
            hidden.append(x)
    return mix(rms_norm(x, params["norm"]), params["head"]).float()


def clip_(params: Params, limit: float = 1.0) -> None:
    """Scale each member's gradient to a norm of at most `limit`."""
    grads = [p.grad for p in params.values() if p.grad is not None]
    norm_E = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
    scale_E = (limit / (norm_E + EPSILON)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale_E.view(-1, *[1] * (g.dim() - 1)))


@dataclass(frozen=True)
class Training:
    """How members are trained. The rate warms up and decays, unless it is `constant`. A limit in `seconds` decays it
    sooner where steps are slow; `smoothing` spreads that share of every target over all tokens. `loss(params,
    *batch())`, one number per member, stands in for cross-entropy."""

    compiled: bool = False
    dtype: torch.dtype = torch.float32
    forward: Callable[..., Tensor] = logits
    constant: bool = False
    smoothing: float = 0.0
    seconds: float | None = None
    loss: Callable[..., Tensor] | None = None


def train(
    params: Params,
    shape: Shape,
    batch: Callable[[], tuple[Tensor, ...]],
    steps: int,
    lr: float,
    report: Callable[[int, Tensor], None] | None = None,
    **training: Any,
) -> Params:
    """Train all members; `batch()` gives inputs, targets and loss mask, each [E, B, T]. Returns detached parameters.
    `training` are the settings of Training. Members that break are an error, which names them."""
    how = Training(**training)
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}

    def loss_of(params: Params, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        out = how.forward(params, shape, inputs, how.dtype)
        nll = functional.cross_entropy(
            out.flatten(0, 2), targets.flatten(), reduction="none", label_smoothing=how.smoothing
        ).view(mask.shape)
        return (nll * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)  # [E]

    loss_fn = torch.compile(how.loss or loss_of) if how.compiled else how.loss or loss_of
    device = next(iter(params.values())).device
    optimiser = torch.optim.AdamW(
        params.values(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    watch = Watch(next(iter(params.values())).shape[0], device)
    warmup, began, gone = max(1, steps // 20), time.monotonic(), 0.0

    def schedule(step: int) -> float:
        left = min(steps - step, (1 - gone) * steps) / max(1, steps - warmup)
        return 1.0 if how.constant else min((step + 1) / warmup, max(0.0, left))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, schedule)
    for step in range(steps):
        loss_E = loss_fn(params, *batch())
        watch.see(loss_E)
        optimiser.zero_grad(set_to_none=True)
        loss_E.sum().backward()
        clip_(params)
        optimiser.step()
        gone = 0.0 if how.seconds is None else (time.monotonic() - began) / how.seconds  # of the time there is
        scheduler.step()
        last = step == steps - 1 or gone >= 1
        if step % 250 == 249 or last:
            check(watch, params, "member {}".format, last)
            if report is not None:
                report(step, loss_E.detach())
        if last:
            break
    return {name: p.detach() for name, p in params.items()}


def select(params: Params, index: Tensor | list[int]) -> Params:
    """The members at `index`, repeats allowed."""
    at = torch.as_tensor(index, device=next(iter(params.values())).device)
    return {name: p.index_select(0, at) for name, p in params.items()}


def to_llama(params: Params, shape: Shape, member: int) -> Any:
    """One member as a `transformers.LlamaForCausalLM`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    one = {name: p[member].float().cpu() for name, p in params.items()}
    state = {
        "model.embed_tokens.weight": one["embed"],
        "model.norm.weight": one["norm"],
        "lm_head.weight": one["head"].T,
    }
    for layer in range(shape.layers):
        to = f"model.layers.{layer}."
        q, k, v = one[f"{layer}.qkv"].chunk(3, 1)
        gate, up = one[f"{layer}.gate_up"].chunk(2, 1)
        state |= {
            to + "input_layernorm.weight": one[f"{layer}.attend_norm"],
            to + "self_attn.q_proj.weight": q.T,
            to + "self_attn.k_proj.weight": k.T,
            to + "self_attn.v_proj.weight": v.T,
            to + "self_attn.o_proj.weight": one[f"{layer}.out"].T,
            to + "post_attention_layernorm.weight": one[f"{layer}.feed_norm"],
            to + "mlp.gate_proj.weight": gate.T,
            to + "mlp.up_proj.weight": up.T,
            to + "mlp.down_proj.weight": one[f"{layer}.down"].T,
        }
    model.load_state_dict({name: value.contiguous() for name, value in state.items()}, strict=True)
    return model.eval()
