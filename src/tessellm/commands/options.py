"""Options in groups: a command takes a few dataclasses instead of twenty parameters, and its help shows each group's
options under a heading, the first line of the dataclass's docstring. Knows no command."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from typing import Annotated, Any, get_args, get_type_hints

from typer.core import TyperCommand


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: parameters that are option groups are spread into the groups' options."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        each.name: each.annotation for each in parameters if dataclasses.is_dataclass(each.annotation)
    }

    def call(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        return command(**given)

    options = [option for each in parameters for option in _options_of(each)]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {option.name: option.annotation for option in options}
    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return call


def _options_of(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """A parameter itself, or those of the group that it is."""
    group = parameter.annotation
    if not dataclasses.is_dataclass(group):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    heading = inspect.cleandoc(group.__doc__ or "").splitlines()[0].rstrip(".")
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        plain, option = get_args(hints[field.name])
        option = copy(option)
        option.rich_help_panel = heading
        annotation = Annotated[plain, option]  # type: ignore[valid-type]
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
        )


class GroupedHelp(TyperCommand):
    """Help with a section for every group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            named = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or named, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
