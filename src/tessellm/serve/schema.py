"""What clients may ask for: OpenAI's requests, as far as a composition can fulfil them, and our extension.

Parameters of OpenAI's that would change the text and that we do not have are refused unless they have the value that
asks for nothing; those that change nothing are taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from .voices import MOST_TOP

LARGEST_SEED = 2**63 - 1


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the text holds half of a surrogate pair, which is no character") from error
    return text


Words = Annotated[str, AfterValidator(_encodable)]
StopText = Annotated[Words, Field(min_length=1, max_length=256)]
TokenId = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
Nothing = Annotated[float, Field(ge=0, le=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Extension(Strict):
    """Ours: who speaks in this request, and whether every token is traced."""

    rule: Words | None = None
    weights: Annotated[dict[Words, float], Field(max_length=64)] | None = None
    trace: bool = False


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Strict):
    """What both endpoints share."""

    model: Words
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = 1
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Annotated[StrictInt, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tessellm: Extension | None = None
    frequency_penalty: Nothing | None = None
    presence_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Words | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def extension(self) -> Extension:
        return self.tessellm or Extension()

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Generation):
    prompt: Words | list[Words] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    suffix: None = None

    @property
    def top(self) -> int | None:
        return self.logprobs


class Part(Strict):
    type: Literal["text"]
    text: Words


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Words | Annotated[list[Part], Field(min_length=1)]
    name: Words | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("top_logprobs are for logprobs: true")
        return value

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
