"""`tessellm inspect`: what a composition is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import RecipeError
from .shared import PLAIN, Dtype, JsonPath, ModelPath, calibration_progress, out, readable_size, write_json

LONGEST_SHOWN = 60  # characters of a rule's parameter


@dataclass(frozen=True)
class PlanOptions:
    """What it needs, and what hardware gives"""

    plan: Annotated[bool, typer.Option("--plan", help="Show that instead; loads nothing.")] = False
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="With --plan: a preset, or GiB@GB/s of a device; may be given several times."),
    ] = None
    context: Annotated[int | None, typer.Option(min=1, help="With --plan: tokens of a request; 4096, or less.")] = None


def inspect(model: ModelPath, *, planned: PlanOptions, dtype: Dtype = None, json_path: JsonPath = None) -> None:
    """Show members, sizes, shared bytes, vocabularies and rule.

    With --plan: memory, largest batch and speed limit. Example: tessellm inspect out --plan --hardware h100
    """
    if planned.plan:
        show_plan(model, planned, dtype, json_path)
        return
    if planned != PlanOptions():
        raise RecipeError("--hardware and --context say what to plan for: give --plan too")
    from ..inspect.inspection import inspect_model
    from ..load import load_model

    report = inspect_model(load_model(model, None, dtype, progress=calibration_progress()))
    table = Table("member", "kind", "weight", "model", "parameters", "memory", "dtype", "context", **PLAIN)
    for row in report["members"]:
        shown = {**row, "parameters": f"{row['parameters']:,}", "added_bytes": readable_size(row["added_bytes"])}
        table.add_row(*(escape(str(value)) for key, value in shown.items() if key != "source"))
    out.print(table)
    for row in report["members"]:
        out.print(f"{row['name']}: {row['source']}", soft_wrap=True, markup=False)
    rule = report["rule"]
    parameters = "".join(f", {key} = {_shown(value)}" for key, value in rule["parameters"].items())
    out.print(
        f"rule: {rule['name']}{parameters} ({rule['summary']}; {rule['reference']})", soft_wrap=True, markup=False
    )
    out.print(
        f"vocabulary: {report['vocab_size']} tokens; context: {report['context']} tokens; "
        f"ends with: {', '.join(report['end_tokens']) or 'nothing'}",
        soft_wrap=True,
        markup=False,
    )
    held, saved = readable_size(report["bytes"]), readable_size(report["shared_bytes"])
    out.print(f"memory: {held} for all members; sharing saves {saved}")
    for note in report["notes"]:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    write_json(json_path, report)


def _shown(value: Any) -> str:
    """A parameter of a rule, as far as it is for reading: --json has all of it."""
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 1] + "…")
    return str(value) if len(str(value)) <= LONGEST_SHOWN else f"({len(value)} entries)"


def show_plan(model: str, planned: PlanOptions, dtype: str | None, json_path: Path | None) -> None:
    """Show what the composition needs, and a line for every kind of device."""
    from ..inspect.planning import DEVICES, device_named, plan, read_needs, report

    devices = [device_named(name) for name in planned.hardware or DEVICES]
    needs = read_needs(model, dtype)
    longest = needs.context or 4096
    plans = [plan(needs, each, min(planned.context or 4096, longest)) for each in devices]
    table = Table("member", "kind", "parameters", "weights", "cache a token", **PLAIN)
    for member in needs.members:
        cache = readable_size(member.kv_values * needs.dtype_bytes)
        table.add_row(member.name, member.kind, f"{member.parameters:,}", readable_size(member.weight_bytes), cache)
    out.print(table)
    remembered = " (with the hidden states that the rule looks back at)" if needs.remembers else ""
    out.print(f"weights: {readable_size(needs.weight_bytes)}")
    out.print(f"cache: {readable_size(needs.kv_bytes)} a token{remembered}", soft_wrap=True)
    out.print(f"a request: {readable_size(needs.request_bytes)} beside its tokens; rule: {needs.rule}")
    table = Table("hardware", "devices", "context", "batch", "tokens/s, one", "tokens/s, all", "serve", **PLAIN)
    for each in plans:
        fits = [str(each.devices), f"{each.context:,}", f"{each.batch:,}"] if each.devices else ["none fits", "", ""]
        speeds = [f"{each.tokens_a_second:,.0f}", f"{each.batch_tokens_a_second:,.0f}"] if each.devices else ["", ""]
        slots = each.served
        serve = f"{slots.slots} × {slots.context:,}: {readable_size(slots.bytes)}" if slots else ""
        table.add_row(escape(each.device.name), *fits, *speeds, serve)
    out.print(table)
    out.print("devices: the least tensor-parallel size; tokens/s: what memory bandwidth allows at most", soft_wrap=True)
    out.print(
        "serve: slots × tokens that tessellm serve makes on one device unless told, and their caches", soft_wrap=True
    )
    write_json(json_path, report(needs, plans))
