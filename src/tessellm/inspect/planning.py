"""What a composition needs and what a machine gives: memory, largest batch, speed limit. For `tessellm inspect --plan`.

Reads configs and the headers of weight files, never a weight. Decoding reads every weight once a step, and every
request's keys and values: what bandwidth allows is an upper limit that no engine passes.

    weights        full members, each by itself; adapters add their own matrices alone
    kv a token     keys and values of every member, adapters too; for a rule with state also the hidden states
    a request      what a rule with state remembers, and a row of log-probabilities, for every member
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import read_config, saved_members, saved_spec
from ..compose import rule_entry, styled_entry
from ..engine.memory import SlotBytes, SlotPlan, cell_values, fit, row_bytes
from ..errors import MemberError, RecipeError, nearest
from ..members import Loading, load_config
from ..members.gguf_files import count_parameters
from ..members.sources import Source, check, find
from ..recipe import FoundRecipe, find_recipe
from ..rules import ComposedRule

GIB = 1 << 30
USABLE = 0.9  # of a device's memory, as vLLM takes it; the rest is for kernels and activations
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}
LARGEST = 1e9  # GiB or GB/s: beyond any machine
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Device:
    """One accelerator: its memory, and how fast it reads it (the vendor's numbers)."""

    name: str
    gib: float
    gb_a_second: float
    most: int = 64  # how many can work together
    on_cpu: bool = False  # whether it is the memory of a processor, which computes rows slowly


DEVICES = {
    device.name: device
    for device in (
        Device("laptop", 16, 60, 1, on_cpu=True),  # memory shared with everything else; two channels of DDR5
        Device("m4-max", 64, 546, 1),
        Device("rtx-4060", 8, 272),
        Device("rtx-4090", 24, 1008),
        Device("l4", 24, 300),
        Device("l40s", 48, 864),
        Device("a100-40", 40, 1555),
        Device("a100-80", 80, 2039),
        Device("h100", 80, 3350),
        Device("h200", 141, 4800),
        Device("mi300x", 192, 5300),
        Device("b200", 180, 8000),
    )
}


@dataclass(frozen=True)
class MemberSize:
    """What one member brings."""

    name: str
    kind: str
    parameters: int
    weight_bytes: int
    kv_values: int  # numbers in the cache, a token
    hidden_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int


@dataclass(frozen=True)
class Needs:
    """What the composition needs, whatever the machine."""

    members: tuple[MemberSize, ...]
    rule: str
    dtype_bytes: int
    remembers: bool  # the rule has state

    @property
    def weight_bytes(self) -> int:
        return sum(member.weight_bytes for member in self.members)

    @property
    def read_bytes(self) -> int:
        """A token's keys and values, which every later step reads."""
        return sum(member.kv_values for member in self.members) * self.dtype_bytes

    @property
    def kept_bytes(self) -> int:
        """A token's hidden states, which a rule with state looks back at."""
        return sum(member.hidden_size for member in self.members) * self.dtype_bytes if self.remembers else 0

    @property
    def kv_bytes(self) -> int:
        """A token's, in all caches together."""
        return self.read_bytes + self.kept_bytes

    def device_kv_bytes(self, size: int) -> float:
        """A token's on each of `size` devices: heads are divided, never below one; hidden states are whole on each."""
        shares = [member.kv_values / min(size, member.kv_heads) for member in self.members]
        return sum(shares) * self.dtype_bytes + self.kept_bytes

    @property
    def request_bytes(self) -> int:
        """A request's, beside its tokens: log-probabilities in float32, and what the rule remembers of the last row."""
        return row_bytes(len(self.members), max(member.vocab_size for member in self.members), self.remembers)

    @property
    def heads(self) -> int:
        """Tensor parallelism divides every member's attention heads."""
        return math.gcd(*(member.heads for member in self.members))

    @property
    def context(self) -> int:
        """The longest text that every member can read; 0 where none says."""
        return min((member.context for member in self.members if member.context), default=0)


@dataclass(frozen=True)
class Plan:
    """The composition on some number of equal devices."""

    device: Device
    devices: int  # the tensor-parallel size; 0 if none fits
    context: int
    batch: int  # the most requests of that length at once
    tokens_a_second: float  # one request's, at most
    batch_tokens_a_second: float  # all requests' together, at most
    served: SlotPlan | None  # what `tessellm serve` makes unless told; None where one device is too small


def plan(needs: Needs, device: Device, context: int) -> Plan:
    """The smallest tensor-parallel size on which one request of that length fits, and what it gives."""
    size = 1
    while size <= device.most:
        batch = largest_batch(needs, device, context, size)
        if batch >= 1 and needs.heads % size == 0:
            one, all_of_them = (speed_limit(needs, device, context, size, requests) for requests in (1, batch))
            return Plan(device, size, context, batch, one, all_of_them, served(needs, device))
        size *= 2
    return Plan(device, 0, context, 0, 0.0, 0.0, None)


def served(needs: Needs, device: Device) -> SlotPlan | None:
    """The slots of `tessellm serve` on one device, which keep no hidden states."""
    free = int(device.gib * GIB * USABLE) - needs.weight_bytes
    slots = fit(SlotBytes(needs.read_bytes, needs.request_bytes), max(0, free), needs.context or None)
    return slots if slots.bytes <= free else None


def largest_batch(needs: Needs, device: Device, context: int, size: int) -> int:
    """How many requests of that length fit beside the weights. Log-probabilities are whole on every device."""
    left = device.gib * GIB * USABLE - needs.weight_bytes / size
    return max(0, int(left // (needs.device_kv_bytes(size) * context + needs.request_bytes)))


def speed_limit(needs: Needs, device: Device, context: int, size: int, requests: int) -> float:
    """Tokens a second that memory bandwidth allows: weights once a step, each request's cache once."""
    read = needs.weight_bytes + requests * context * needs.read_bytes
    return requests * size * device.gb_a_second * 1e9 / read


def device_named(name: str) -> Device:
    """Return a preset, or a device of one's own from its GiB and GB/s: "24@1008"."""
    if name in DEVICES:
        return DEVICES[name]
    memory, _, bandwidth = name.partition("@")
    try:
        own = float(memory), float(bandwidth)
    except ValueError:
        known = "or a device's GiB and GB/s, such as 24@1008"
        raise RecipeError(f"unknown hardware {name!r}; {nearest(name, DEVICES)}, {known}") from None
    if not all(0 < number <= LARGEST for number in own):
        raise RecipeError(f"memory and bandwidth must be above 0 and at most {LARGEST:g}; got {name!r}")
    return Device(f"{own[0]:g} GiB, {own[1]:g} GB/s", *own)


def read_needs(model: str, dtype: str | None = None) -> Needs:
    """What a saved composition, a recipe or a folder of adapters needs. Nothing but configs and headers is read."""
    if dtype is not None and dtype not in DTYPES:
        raise RecipeError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    written = find_recipe(model)
    places, rule = _saved(model) if written is None else _from_recipe(written)
    sizes: list[MemberSize] = []
    for name, (source, kind) in places.items():
        sizes.append(_member_size(name, source, kind, sizes[0] if sizes else None, places["base"][0], dtype))
    stored = DTYPES[dtype] if dtype else max(2, sizes[0].weight_bytes // max(1, sizes[0].parameters))
    made = ComposedRule.make(rule)
    return Needs(tuple(sizes), made.name, stored, made.stateful)


def _saved(model: str) -> tuple[dict[str, tuple[Source, str]], Any]:
    folder = find(model, "the composition", nested=True).directory
    config = read_config(folder)
    places = {}
    for member in saved_members(config, folder):
        spec = saved_spec(member, folder, Loading())
        source = find(str(spec.source), f"member {member.name!r}", spec.revision)
        places[member.name] = (source, str(member.kind))
    return places, config.rule


def _from_recipe(written: FoundRecipe) -> tuple[dict[str, tuple[Source, str]], Any]:
    recipe = written.recipe
    places, members = {}, {"base": recipe.base, **recipe.experts}
    for name, member in members.items():
        wanted = member.seen_from(written.folder)
        source = find(str(wanted.source), f"member {name!r}", wanted.revision)
        places[name] = (source, "adapter" if source.is_adapter else "full")
    return places, styled_entry(rule_entry(recipe.rule), members)


def _member_size(
    name: str, source: Source, kind: str, base: MemberSize | None, base_source: Source, dtype: str | None
) -> MemberSize:
    parameters, weight_bytes = _count(source, check(source, f"member {name!r}"), dtype)
    if kind == "full" and source.is_adapter and base is not None:  # merged into a model of its own when loaded
        parameters, weight_bytes = base.parameters, base.weight_bytes
    elif source.is_adapter and base is not None and base.weight_bytes in (2 * base.parameters, 4 * base.parameters):
        weight_bytes = parameters * base.weight_bytes // base.parameters  # it runs in its base's dtype
    config = load_config(base_source if source.is_adapter else source)
    text: Any = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise MemberError(f"member {name!r}: its config does not say how many attention heads it has")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    context = getattr(text, "max_position_embeddings", None) or 0
    sizes = (text.hidden_size, heads, kv_heads, text.vocab_size, context)
    return MemberSize(name, kind, parameters, weight_bytes, cell_values(config), *sizes)


def _count(source: Source, files: Sequence[Path], dtype: str | None) -> tuple[int, int]:
    """Numbers and bytes of a member's weights once they are loaded, from the headers of its files."""
    if source.file is not None:  # dequantised when loaded
        numbers = count_parameters(source.path)
        return numbers, numbers * DTYPES[dtype or "float32"]
    numbers = total = 0
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for key, entry in header.items():
            if key != "__metadata__":
                count = math.prod(entry["shape"])
                numbers += count
                total += count * (DTYPES[dtype] if dtype else BYTES.get(entry["dtype"], 2))
    return numbers, total


def report(needs: Needs, plans: Sequence[Plan]) -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "members": [asdict(member) for member in needs.members],
        "rule": needs.rule,
        "weight_bytes": needs.weight_bytes,
        "kv_bytes_a_token": needs.kv_bytes,
        "bytes_a_request": needs.request_bytes,
        "plans": [asdict(each) for each in plans],
    }
