"""A router of your own: python examples/own_router.py BASE SHORT LONG --prompt TEXT

Prompts of fewer than twenty tokens go to the expert SHORT, all others to LONG. The members' energies are not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import tessellm
from tessellm.routing.route import Route, RoutedPrompt


class ByLength:
    """Routes by the number of the user's tokens."""

    def __init__(self) -> None:
        self.read: list[torch.Tensor] = []

    @contextmanager
    def tap(self, base: torch.nn.Module) -> Iterator[ByLength]:
        """Note how many tokens the base's first block is given: a row per token is what a prompt is known by."""
        block = next(module for module in base.modules() if isinstance(module, torch.nn.ModuleList))[0]
        handle = block.register_forward_pre_hook(lambda _, given, named: self._note(*given, **named), with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()

    def _note(self, hidden_states: torch.Tensor, *_: object, **__: object) -> None:
        self.read.append(torch.zeros(*hidden_states.shape[:2], 1))

    def take(self) -> torch.Tensor:
        """Return energies since the last take, [rows, tokens, experts]: here a zero per token."""
        found, self.read = torch.cat(self.read, 1), []
        return found

    def route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        names = ["short" if prompt.user.stop - prompt.user.start < 20 else "long" for prompt in prompts]
        return [Route({"base": 0.1, "short": 0.0, "long": 0.0, name: 0.9}, name) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("short")
    parser.add_argument("long")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    model = tessellm.compose(arguments.base, {"short": arguments.short, "long": arguments.long}, router=False)
    model.router = ByLength()
    print(model.route(arguments.prompt).selected)
    messages = [{"role": "user", "content": arguments.prompt}]
    inputs = model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens)
    print(model.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
