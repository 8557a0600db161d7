"""A prompt as a user's turn in the chat template, perhaps after a system prompt. Knows tokenizers, no models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import PromptError
from ..vocabulary.chats import RenderedChat, render_chat


@dataclass(frozen=True)
class Chat:
    """How prompts are put to a chat model."""

    system: str | None = None

    def put(self, tokenizer: Any, prompt: str) -> RenderedChat:
        """Return the chat up to where the answer begins; the template writes special tokens itself."""
        if not tokenizer.chat_template:
            raise PromptError("no member has a chat template; leave out --chat and --system")
        turns = [{"role": "system", "content": self.system}] if self.system is not None else []
        turns.append({"role": "user", "content": prompt})
        try:
            return render_chat(tokenizer, turns)
        except Exception as error:  # a template raises what it likes
            instead = "say --no-chat" if self.system is None else "leave out --system"
            raise PromptError(
                f"the chat template does not take these messages: {error}. Mend it, or {instead}"
            ) from error
