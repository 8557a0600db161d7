"""Answers on a console: what base, expert and composition say, whose token each is, and the posterior.

Without colours, owners are named in brackets. Knows texts and numbers, no models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..diagnose.shown import colour
from ..text.visible import visible
from .answers import DemoAnswer

COMPOSED = "composed"
EXPERTS, PICTURE, REPORT = "experts", "demo.png", "report.html"  # in the demo's folder
LONGEST = 200  # characters that are shown of what a member says alone


def answers_table(answers: Sequence[DemoAnswer], members: Sequence[str], colours: bool) -> Table:
    """A block per prompt: the prompt, each member with its answer, and the data's answer."""
    table = Table.grid(padding=(0, 2))
    for answer in answers:
        table.add_row(Text("prompt", style="bold"), Text(one_line(answer.asked.prompt), style="bold"))
        for name, text in answer.alone.items():
            table.add_row(Text(name, style=_style(members.index(name))), Text(one_line(text)))
        table.add_row(Text(COMPOSED, style="bold"), spoken(answer, members, colours))
        if answer.asked.answer:
            table.add_row(Text("data", style="dim"), Text(one_line(answer.asked.answer), style="dim"))
        table.add_row("", "")
    return table


def spoken(answer: DemoAnswer, members: Sequence[str], colours: bool) -> Text:
    """The composition's answer, each token in its owner's colour, or with owners in brackets; the base has neither."""
    text = Text()
    for owner, piece in _runs(answer):
        shown = visible(piece.replace("\n", "↵"), keep="")
        if colours or not owner:
            text.append(shown, _style(owner))
        else:
            text.append(f"[{members[owner]}|{shown}]")
    return text.append("" if answer.stopped else " …", "dim")


def posterior_table(answers: Sequence[DemoAnswer], members: Sequence[str]) -> Table:
    """The posterior over the members where each answer begins."""
    title = "posterior over the members where the answer begins, %"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt", no_wrap=True, max_width=32)
    for number, name in enumerate(members):
        table.add_column(Text(name, style=_style(number)), justify="right")
    for answer in answers:
        cells = [Text(f"{share:.0%}".rstrip("%"), _emphasis(share, n)) for n, share in enumerate(answer.share_TM[0])]
        table.add_row(Text(ending(answer.asked.prompt, 32)), *cells)
    return table


def next_commands(out: Path, seconds: float, prompt: str) -> Text:
    """What to do with the composition."""
    folder = out / EXPERTS
    return Text.assemble(
        f"Done in {seconds:.0f} s. The picture is {out / PICTURE}. Who wrote which token is in {out / REPORT}. "
        f"The composition is a checkpoint, {folder}:\n\n",
        (f'  tessellm generate {folder} --trace "{prompt}"\n', "bold"),
        ('  pip install -e ".[serve]"\n', "bold"),
        (f"  tessellm serve {folder}", "bold"),
        ("    # OpenAI's API on http://127.0.0.1:8000/v1; the playground: http://127.0.0.1:8000\n", "dim"),
    )


def one_line(text: str, longest: int = LONGEST) -> str:
    """A text on one line, shortened, with its line breaks shown."""
    line = visible(text.strip().replace("\n", "↵"), keep="")
    return line if len(line) <= longest else line[: longest - 2].rstrip() + " …"


def ending(text: str, longest: int) -> str:
    """The end of a text: prompts of one kind begin alike."""
    line = one_line(text, len(text) + 1)
    return line if len(line) <= longest else "… " + line[2 - longest :].lstrip()


def _runs(answer: DemoAnswer) -> Iterator[tuple[int, str]]:
    """Neighbouring pieces of one owner together."""
    owner, run = -1, ""
    for number, piece in zip(answer.owners(), answer.pieces, strict=True):
        if number != owner and run:
            yield owner, run
            run = ""
        owner, run = number, run + piece
    if run:
        yield owner, run


def _style(owner: int) -> str:
    return colour(owner) if owner else ""


def _emphasis(share: float, owner: int) -> str:
    return f"bold {_style(owner)}".strip() if share >= 0.5 else "dim" if share < 0.005 else ""
