"""`tessellm inspect`: what a composition is made of."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from .shared import PLAIN, Device, JsonPath, ModelPath, load, out, readable_size, write_json


def inspect(model: ModelPath, device: Device = None, json_path: JsonPath = None) -> None:
    """Show a composition's members, sizes, shared bytes, vocabulary agreement and rule."""
    from ..inspection import inspect_model

    report = inspect_model(load(model, device, None))
    table = Table("member", "kind", "weight", "model", "parameters", "memory", "dtype", "context", **PLAIN)
    for row in report["members"]:
        shown = {**row, "parameters": f"{row['parameters']:,}", "added_bytes": readable_size(row["added_bytes"])}
        table.add_row(*(escape(str(value)) for key, value in shown.items() if key != "source"))
    out.print(table)
    for row in report["members"]:
        out.print(f"{row['name']}: {row['source']}", soft_wrap=True, markup=False)
    rule = report["rule"]
    parameters = "".join(f", {key} = {value}" for key, value in rule["parameters"].items())
    out.print(
        f"rule: {rule['name']}{parameters} ({rule['summary']}; {rule['reference']})", soft_wrap=True, markup=False
    )
    out.print(f"termination: {report['termination']}")
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
