"""What clients get: OpenAI's answers, whole and in pieces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TracedToken(BaseModel):
    """Ours: who decided a token, and what every member would have said."""

    id: int
    text: str
    owner: str
    share: dict[str, float]  # of each member in what is said; a style's is what it moved
    log_z: float
    clash: float
    gap: float
    novel: bool
    divergence: dict[str, float]
    logprob: dict[str, float]
    top: dict[str, list[tuple[str, float]]]
    belief: dict[str, float] | None = None  # where the rule is a mixture: in the base, every expert, and Eq. 2


class AnswerRoute(BaseModel):
    """Ours: who answers, and what the router said of the prompt."""

    selected: str  # by the router or the request; mixed: several, and nobody selected one
    active: list[str]  # the members that run
    prior: dict[str, float] | None = None  # the largest shares; these where the prompt was routed
    threshold: float | None = None
    score: float | None = None  # of the selected expert, comparable with the threshold


class ChoiceAbout(BaseModel):
    """Ours: the routing, on a stream's first piece, and the trace where it was asked for."""

    route: AnswerRoute | None = None
    trace: list[TracedToken] | None = None


class Choice(BaseModel):
    index: int
    finish_reason: FinishReason | None
    tessellm: ChoiceAbout | None = None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Said(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Choice):
    message: Said
    logprobs: ChatLogprobs | None


class ChatPiece(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Usage | None = None


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionPiece(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatPiece]


class ModelMember(BaseModel):
    name: str
    model: str
    weight: float | None
    colour: str  # in which the playground shows it
    line: str


class ModelAbout(BaseModel):
    """Ours: what a composition is made of; of a member, whose it is."""

    kind: Literal["composition", "member"]
    rule: str | None = None
    rules: list[str] = []
    summaries: dict[str, str] = {}  # of the rules
    chat: bool = False  # whether there is a chat template
    members: list[ModelMember] = []


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tessellm"] = "tessellm"
    root: str | None = None  # where it came from
    parent: str | None = None  # of an expert: the base's id
    max_model_len: int | None = None
    tessellm: ModelAbout


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: str
    detail: Any = None
