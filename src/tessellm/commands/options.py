"""Options in groups: a command takes a few dataclasses instead of twenty parameters, and its help shows each group's
options under a heading, the first line of the dataclass's docstring. Here too are the groups that several commands
have, which mean the same in all of them. Knows no command."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from .shared import Placement, calibration_progress, err, words


@dataclass(frozen=True)
class SpeakerOptions(Placement):
    """Who speaks, and where"""

    rule: Annotated[str | None, typer.Option(help="Another rule for the members: see docs/routing.md.")] = None
    weights: Annotated[
        str | None, typer.Option(metavar="NAME=NUMBER,…", help="Other weights; experts not named keep theirs.")
    ] = None

    def load(self, model: str) -> Any:
        """Load a composition, or one of its members (MODEL:MEMBER), as these options say."""
        weights = None if self.weights is None else named_numbers(self.weights, "--weights")
        from ..load import load_speaker, split_speaker
        from ..recipe import find_recipe

        found = find_recipe(split_speaker(model)[0])
        for note in found.notes if found else ():
            err.print(f"note: {escape(note)}", soft_wrap=True)
        return load_speaker(model, self.device, self.dtype, self.rule, weights, calibration_progress())

    def load_composition(self, model: str, purpose: str) -> Any:
        """Load a composition; refuse a member alone."""
        from ..errors import MemberError
        from ..load import split_speaker

        path, member = split_speaker(model)
        if member is not None:
            raise MemberError(
                f"{model!r} is a member and speaks alone: {purpose}. Expected a composition, such as {path}"
            )
        return self.load(model)


@dataclass(frozen=True)
class ChatOptions:
    """How prompts are put"""

    chat: Annotated[
        bool | None,
        typer.Option(
            help="Put each prompt through the chat template, or not. If not given: `generate` does where the rule is "
            "mixture, which routes chats.",
            show_default=False,
        ),
    ] = None
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system prompt before each; goes with --chat, or brings it.")
    ] = None

    def as_chat(self) -> Any:
        """Return what the library calls it: a Chat, or None for prompts as they are."""
        if not self.chat and self.system is None:
            return None
        from ..text.chat import Chat
        from ..text.inputs import check_characters

        check_characters(self.system or "", "--system")
        return Chat(self.system)

    def lacks_chat(self, composition: Any, prompts: Sequence[str]) -> bool:
        """Whether nothing was said of chats, and prompts come as they are to a composition that reads chats."""
        from ..text.prompts import expects_chat

        return self.chat is None and self.system is None and expects_chat(composition, prompts)


def named_numbers(text: str, option: str) -> dict[str, float]:
    """Read NAME=NUMBER with commas between them."""
    from ..errors import RecipeError

    found: dict[str, float] = {}
    for word in words(text):
        name, equals, number = (part.strip() for part in word.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not name or name in found or not math.isfinite(value):
            what = f"{name!r} twice" if name in found else repr(word)
            raise RecipeError(
                f"{option}: expected NAME=NUMBER with commas between, such as math=0.5,code=1; got {what}"
            )
        found[name] = value
    if not found:
        raise RecipeError(f"{option}: expected NAME=NUMBER with commas between, such as math=0.5,code=1; got {text!r}")
    return found


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
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
