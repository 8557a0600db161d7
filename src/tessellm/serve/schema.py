"""What clients may ask for: OpenAI's requests, as far as a composition can fulfil them, and our extension.

Parameters of OpenAI's that would change the text and that we do not have are refused unless they have the value that
asks for nothing; those that change nothing are taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .targets import MOST_TOP

LARGEST_SEED = 2**63 - 1
MOST_CHOICES = 128  # that OpenAI's API has; a server allows fewer
ABSENT = frozenset(  # parameters of OpenAI's that are taken only with the value that asks for nothing
    ("logit_bias", "best_of", "suffix")
)
MOST_KEYS = 64  # of an object: a body has room for many thousands, and each that is wrong would be reported


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the text holds half of a surrogate pair, which is no character") from error
    return text


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_KEYS:
        raise ValueError(f"expected at most {MOST_KEYS} keys; got {len(given)}")
    return given


def _kind(given: Any) -> str | None:
    """Which of the forms that a value may have: a text, or a list, by what is first in it."""
    if isinstance(given, list):
        first = given[0] if given else ""
        return {list: "lists", int: "numbers"}.get(type(first), "list")
    if isinstance(given, dict):
        return "mapping"
    return "text" if isinstance(given, str) else None


def _one_of(expected: str) -> Discriminator:
    return Discriminator(_kind, custom_error_type="form", custom_error_message=f"expected {expected}")


Item = TypeVar("Item")
Words = Annotated[str, AfterValidator(_encodable)]
StopText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_encodable)]
TokenId = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Listed = Annotated[list[Item], Field(min_length=1, fail_fast=True)]  # the first that is wrong is enough
Prompts = Annotated[Listed[Item], Field(max_length=MOST_CHOICES)]
Named = Annotated[dict[Item, Number], BeforeValidator(_few)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, given: Any) -> Any:
        return _few(given)


class Extension(Strict):
    """Ours: what is mixed in this request, and whether every token is traced."""

    experts: (
        Annotated[
            Annotated[Words, Tag("text")]
            | Annotated[Named[Words], Field(min_length=1, max_length=MOST_KEYS), Tag("mapping")],
            _one_of("a member's name, or experts with weights"),
        ]
        | None
    ) = None
    rule: Words | None = None
    weights: Annotated[Named[Words], Field(max_length=MOST_KEYS)] | None = None
    trace: StrictBool = False


class StreamOptions(Strict):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class JsonSchema(Strict):
    name: Words | None = None
    description: Words | None = None
    strict: StrictBool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Strict):
    """What the text is held to: nothing, any JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, which needs it")
        return self


class Generation(Strict):
    """What both endpoints share."""

    model: Words
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = 1.0
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = 1
    stop: (
        Annotated[
            Annotated[StopText, Tag("text")]
            | Annotated[list[StopText], Field(max_length=16, fail_fast=True), Tag("list")],
            _one_of("a text or up to 16 texts"),
        ]
        | None
    ) = None
    seed: Annotated[StrictInt, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    tessellm: Extension | None = None
    response_format: ResponseFormat | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: StrictBool = False  # as vLLM's: for measurements
    logit_bias: Annotated[Named[str], Field(max_length=0)] | None = None
    user: Words | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream: true")
        return self

    @model_validator(mode="after")
    def _form_ends(self) -> Generation:
        if self.ignore_eos and self.is_structured:
            raise ValueError("response_format ends a text where its form is whole: leave out ignore_eos")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def extension(self) -> Extension:
        return self.tessellm or Extension()

    @property
    def is_structured(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that the text is held to; None: any object, or nothing."""
        asked = self.response_format.json_schema if self.response_format else None
        return asked.schema_ if asked else None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Generation):
    prompt: Annotated[
        Annotated[Words, Tag("text")]
        | Annotated[Prompts[Words], Tag("list")]
        | Annotated[Listed[TokenId], Tag("numbers")]
        | Annotated[Prompts[Listed[TokenId]], Tag("lists")],
        _one_of("a text, token ids, or a list of either"),
    ]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    echo: StrictBool | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _no_log_probabilities_of_prompts(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo gives the text of the prompt, not its log-probabilities: leave out echo or logprobs")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs


class ContentPart(Strict):
    type: Literal["text"]
    text: Words


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Words, Tag("text")] | Annotated[Listed[ContentPart], Tag("list")],
        _one_of("a text or a list of parts"),
    ]
    name: Words | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    messages: Listed[Message]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[Any, Field(json_schema_extra={"enum": [None, []]})] = None
    functions: Annotated[Any, Field(json_schema_extra={"enum": [None, []]})] = None
    tool_choice: Annotated[Any, Field(json_schema_extra={"enum": [None, "none"]})] = None
    function_call: Annotated[Any, Field(json_schema_extra={"enum": [None, "none"]})] = None
    parallel_tool_calls: StrictBool | None = None

    @field_validator("tools", "tool_choice", "functions", "function_call")
    @classmethod
    def _no_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and value != ([] if info.field_name in ("tools", "functions") else "none"):
            raise ValueError("this server calls no tools: it writes text. Leave it out")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("top_logprobs are for logprobs: true")
        return value

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
