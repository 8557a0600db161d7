"""`tessellm chat`: a conversation in the terminal that shows who answers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape

from .generate import SamplingOptions
from .options import SpeakerOptions
from .shared import JsonPath, SpeakerPath, err, out, write_json
from .streams import OnTerminal

HELP = """\
/route TEXT     what the router says of a message, without an answer
/experts NAME…  these experts answer, or the base; without names: whom the router selects
/reset          forget the conversation
/help           this list
/quit           end; so does Ctrl-D
Ctrl-C stops an answer."""
COMMANDS = ("/route", "/experts", "/reset", "/help", "/quit")
SMALLEST = 0.005  # a share that is shown


def chat(
    model: SpeakerPath,
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.")] = None,
    sampling: SamplingOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
) -> None:
    """Chat with a composition in the terminal, and see who answers.

    Example: tessellm chat adapters/smollm2
    """
    from ..text.chat import Chat
    from ..text.conversation import Conversation
    from ..text.inputs import check_characters
    from ..text.options import TextOptions

    check_characters(system or "", "--system")
    options = TextOptions(
        sampling.max_new_tokens or 512, sampling.temperature, sampling.top_p, sampling.seed,
        tuple(sampling.stop or ()), Chat(system),
    )  # fmt: skip
    conversation = Conversation(speaker.load(model), options)
    names = ", ".join(name for name in conversation.model.members if name != "base")
    if sys.stdin.isatty():
        err.print(f"{escape(names)} on their base; /help lists commands", soft_wrap=True)
    for line in _lines():
        if not _obey(conversation, line):
            break
    write_json(json_path, conversation.history)


def _lines() -> Iterator[str]:
    """Yield what the user writes, until the end; Ctrl-C at the prompt clears the line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _prepare_readline()
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            err.print("\n(/quit or Ctrl-D ends)")
            continue
        if line:
            yield line


def _prepare_readline() -> None:
    """Give `input` a history, editing and completion of commands, where Python has them."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, number: [*(c for c in COMMANDS if c.startswith(text)), None][number])
    readline.parse_and_bind("tab: complete")


def _obey(conversation: Any, line: str) -> bool:
    """Do what a line says; False when it ends the chat. What is wrong with it is said, and the chat goes on."""
    from ..errors import TessellmError, nearest

    word, _, rest = line.partition(" ")
    try:
        if word == "/quit":
            return False
        if word == "/help":
            out.print(HELP, markup=False, soft_wrap=True)
        elif word == "/reset":
            conversation.reset()
        elif word == "/experts":
            conversation.choose(rest.split())
        elif word == "/route":
            _show_route(conversation, rest.strip())
        elif word.startswith("/") and word[1:].isalpha():
            err.print(f"there is no command {escape(word)}; {escape(nearest(word, COMMANDS))}", soft_wrap=True)
        else:
            _answer(conversation, line)
    except TessellmError as error:
        err.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
    return True


def _answer(conversation: Any, text: str) -> None:
    """Stream an answer behind the names of those who write it."""
    shown, told = OnTerminal(sys.stdout), False
    with _ctrl_c_stops() as stopped:
        for shares, piece in conversation.answer(text, stopped):
            if not told and shares:
                out.print(f"[bold]{escape(_who(shares))}[/bold]", soft_wrap=True)
                told = True
            shown.write(piece)
            shown.flush()
    print(flush=True)
    if stopped():
        err.print("(stopped)")


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C stop the answer between two tokens; a second one does what it does elsewhere."""
    pressed: list[bool] = []
    before = signal.getsignal(signal.SIGINT)

    def press(*_: Any) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _who(shares: dict[str, float | None]) -> str:
    """Name those who answer, with their shares where the router gave several some."""
    if len(shares) == 1 or None in shares.values():
        return f"{', '.join(shares)}:"
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None and share >= SMALLEST]
    return f"{', '.join(parts)}:"


def _show_route(conversation: Any, text: str) -> None:
    """Show what the router says of a message."""
    from ..errors import PromptError

    if not text:
        raise PromptError("/route: expected a message, such as /route What is 3 + 4?")
    route = conversation.route(text)
    for name, share in sorted(route.prior.items(), key=lambda item: -item[1]):
        own = route.scores.get(name)
        score = "" if own is None else f"  score {own:.2f}"
        out.print(f"{name:<12} {share:>6.1%}{score}", markup=False, soft_wrap=True)
    out.print(f"selected: {route.selected}; threshold {route.threshold:.2f}", markup=False, soft_wrap=True)
