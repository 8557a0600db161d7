"""Keep what candidate energies need of each prompt, so that the base reads every prompt once.

    python -m tessellm_lab.routing.features --data DATA --adapters DIR [DIR …] --out CACHE

Per prompt token and adapted layer of an expert (a pair): ‖V x‖²/‖x‖² over the four leading right singular vectors V of
ΔW. At the last token and as the mean over the user's tokens: the same for each vector alone. Shards of some prompts;
a second start goes on where the first one ended. Scaled by SCALE, in half precision.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tessellm.members import Loading, MemberSpec, load_member
from tessellm.routing.energy import shared_inputs
from tessellm.routing.template import ChatMarks
from tessellm.vocabulary.chats import encode_chat

from .prompts import LabelledPrompt, labelled_prompts

ROWS, SCALE, SHARD, BATCH_TOKENS = 4, 64.0, 128, 2048
STYLES = {"capitals"}


class LayerTap:
    """Collects shares of all pairs in the base's forward passes."""

    def __init__(self, base: Any, experts: dict[str, dict[str, Tensor]]):
        paths = sorted({path for own in experts.values() for path in own})
        self.pairs: list[tuple[str, str]] = []
        self.found: dict[int, Tensor] = {}
        for number, group in enumerate(shared_inputs(base, paths)):
            rows = []
            for name, own in experts.items():
                for path in (path for path in group if path in own):
                    self.pairs.append((name, path))
                    rows.append(torch.nn.functional.pad(own[path], (0, 0, 0, ROWS - len(own[path]))))
            base.get_submodule(group[0]).register_forward_pre_hook(self._hook(number, torch.cat(rows)))

    def _hook(self, number: int, rows_RI: Tensor) -> Any:
        def read(module: Any, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            unit = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
            self.found[number] = (unit @ rows_RI.T).square().unflatten(-1, (-1, ROWS)) * SCALE

        return read

    def take(self) -> Tensor:
        """Return share_BTMR."""
        return torch.cat([self.found[number] for number in sorted(self.found)], 2)


def adapter_directions(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Return the leading right singular vectors of each layer's ΔW, and the singular values."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    right, values = {}, {}
    for key in (key for key in tensors if "lora_A" in key):
        up_OR = tensors[key.replace("lora_A", "lora_B")].float() * scale
        _, sigma, vectors = torch.linalg.svd(torch.linalg.qr(up_OR).R @ tensors[key].float(), full_matrices=False)
        path = key.split("base_model.model.")[1].split(".lora_A")[0]
        right[path], values[path] = vectors[:ROWS], sigma.tolist()
    return right, values


def encode(tokenizer: Any, prompt: LabelledPrompt) -> list[int]:
    if not prompt.template:
        return list(tokenizer(prompt.text).input_ids)
    return list(encode_chat(tokenizer, [{"role": role, "content": text} for role, text in prompt.messages]))


@torch.inference_mode()
def read_shard(base: Any, tap: LayerTap, marks: ChatMarks, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Return the shares of these prompts' tokens from the last user message on, one prompt after the other."""
    token: dict[int, Tensor] = {}
    last, mean = torch.zeros(2, len(rows), len(tap.pairs), ROWS)
    spans = np.zeros((len(rows), 2), int)  # the tokens that are kept; the user's among them
    for group, skipped in _grouped(rows, marks):
        longest = max(len(rows[place]) for place in group)
        ids = torch.tensor([[*rows[place], *[0] * (longest - len(rows[place]))] for place in group])
        cache = None
        if skipped:
            cache = base.base_model(input_ids=ids[:1, :skipped], use_cache=True).past_key_values
            cache.batch_repeat_interleave(len(group))
        base.base_model(input_ids=ids[:, skipped:], past_key_values=cache, use_cache=bool(skipped))
        for place, share_TMR in zip(group, tap.take(), strict=True):
            user, stop = marks.read(rows[place]).user, len(rows[place])
            share_TMR = share_TMR[user.start - skipped : stop - skipped]
            spoken = max(user.stop - user.start, 1)
            token[place] = share_TMR.sum(-1).half()
            last[place], mean[place] = share_TMR[-1], share_TMR[:spoken].mean(0)
            spans[place] = stop - user.start, user.stop - user.start
    every = torch.cat([token[place] for place in range(len(rows))])
    return {"token": every.numpy(), "last": last.half().numpy(), "mean": mean.half().numpy(), "spans": spans}


def _grouped(rows: list[list[int]], marks: ChatMarks) -> list[tuple[list[int], int]]:
    """Return batches of prompts of about one length, each with the number of first tokens that all of it share."""
    groups: list[tuple[list[int], int]] = []
    prefix = list(marks.prefix)
    shares = [bool(prefix) and row[: len(prefix)] == prefix for row in rows]
    for place in sorted(range(len(rows)), key=lambda place: (shares[place], len(rows[place]))):
        skipped = len(prefix) if shares[place] else 0
        full = not groups or groups[-1][1] != skipped
        if full or (len(groups[-1][0]) + 1) * len(rows[place]) > BATCH_TOKENS:
            groups.append(([], skipped))
        groups[-1][0].append(place)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="holds real/ and real2/")
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="prompts per skill and part")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop in time; start again to go on")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    files = [file for root in arguments.adapters for file in sorted(root.glob("*/adapter_config.json"))]
    folders = {file.parent.name: file.parent for file in files if file.parent.name not in STYLES}
    experts = {name: adapter_directions(folder) for name, folder in folders.items()}
    member = load_member("base", MemberSpec("smollm2"), None, Loading(dtype="float32"))
    base, tokenizer = member.model, member.tokenizer
    marks = ChatMarks.of(tokenizer)
    tap = LayerTap(base, {name: right for name, (right, _) in experts.items()})
    prompts = list(labelled_prompts(arguments.data, list(experts), arguments.count))
    rows = [encode(tokenizer, prompt) for prompt in prompts]
    about: dict[str, Any] = defaultdict(list)
    for prompt, row in zip(prompts, rows, strict=True):
        about["part"].append(prompt.part)
        about["skill"].append(prompt.skill)
        about["text"].append(prompt.text)
        about["ids"].append(row[marks.read(row).user])
    about |= {"pairs": tap.pairs, "experts": list(experts), "sigma": {name: own[1] for name, own in experts.items()}}
    (arguments.out / "about.json").write_text(json.dumps(about))
    print(f"{len(prompts)} prompts, {sum(map(len, rows))} tokens, {len(tap.pairs)} pairs", flush=True)
    for start in range(0, len(rows), SHARD):
        file = arguments.out / f"shard-{start:05d}.npz"
        if file.exists():
            continue
        if time.monotonic() - began > arguments.minutes * 60:
            print("time is over; start again to go on", flush=True)
            return
        found = read_shard(base, tap, marks, rows[start : start + SHARD])
        temporary = file.with_suffix(".tmp")
        with temporary.open("wb") as opened:
            np.savez(opened, allow_pickle=False, **found)
        temporary.rename(file)
        print(f"{time.monotonic() - began:.0f} s: {min(start + SHARD, len(rows))}", flush=True)
    print("all done", flush=True)


if __name__ == "__main__":
    main()
