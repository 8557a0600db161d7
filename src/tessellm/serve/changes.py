"""Changes: experts that are loaded and unloaded while others are written to, by vLLM's endpoints, bodies and answers.

Each change makes a new composition around the same weights, and a runner for it; the old runner finishes what it let
in. One change at a time. Nothing is written to disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt

from ..checkpoint.changes import check_removable, with_expert, without_expert
from ..errors import MemberError, TessellmError, quoted
from ..members import check_name, sources
from ..members.folders import adapter_spec
from ..model import ComposedForCausalLM
from .refusals import Refusal, bad
from .schema import Words
from .service import Service

log = logging.getLogger("tessellm.serve")


class LoadAdapter(BaseModel):
    """vLLM's request; keys of it that mean nothing here are ignored."""

    model_config = ConfigDict(extra="ignore")

    lora_name: Words
    lora_path: Words
    load_inplace: StrictBool = False


class UnloadAdapter(BaseModel):
    model_config = ConfigDict(extra="ignore")

    lora_name: Words
    lora_int_id: StrictInt | None = None


class Changes:
    """The experts of a running server."""

    def __init__(self, service: Service):
        self.service = service
        self.lock = asyncio.Lock()

    async def load(self, asked: LoadAdapter) -> str:
        """Load an adapter as an expert; return vLLM's words."""
        name = asked.lora_name
        if not name or not asked.lora_path:
            raise bad("Both 'lora_name' and 'lora_path' must be provided.")
        async with self.lock:
            names = self.service.model.config.member_names
            if name in names and not asked.load_inplace:
                raise bad(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True."
                )
            await self._change(lambda model: _loaded(model, name, asked.lora_path))
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, asked: UnloadAdapter) -> str:
        """Unload an expert; return vLLM's words."""
        name = asked.lora_name
        if not name:
            raise bad("'lora_name' needs to be provided to unload a LoRA adapter.")
        async with self.lock:
            experts = self.service.model.config.member_names[1:]
            if name not in experts:
                raise Refusal(404, f"The lora adapter '{name}' cannot be found.", "lora_name", "model_not_found")
            await self._change(lambda model: _unloaded(model, name))
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _change(self, change: Callable[[ComposedForCausalLM], ComposedForCausalLM]) -> None:
        """Change the composition in a thread of its own; requests go on meanwhile. What is refused changes nothing."""
        await self.service.finished()  # two engines at once, not more
        try:
            model = await to_thread.run_sync(partial(change, self.service.model))
            make = partial(self.service.runner_of, model)
            if model.device.type == "cuda":  # while steps are captured, no other thread may use the device
                runner = await self.service.scheduler.between_steps(make)
            else:
                runner = await to_thread.run_sync(make)
        except TessellmError as error:
            raise bad(str(error)) from error
        self.service.go_on_with(runner)
        log.info("experts: %s", ", ".join(runner.names[1:]))


def _loaded(model: ComposedForCausalLM, name: str, path: str) -> ComposedForCausalLM:
    """Return the composition with the adapter in that folder or hub repository."""
    check_name(name)
    try:
        source = sources.find(path, f"member {name!r}")
    except MemberError as error:
        raise Refusal(404, f"No adapter found for {quoted(path)}: {error}", "lora_path", "model_not_found") from error
    if not source.is_adapter:
        why = f"No adapter found for {quoted(path)}: the folder holds no adapter_config.json"
        raise Refusal(404, why, "lora_path", "model_not_found")
    return with_expert(model, adapter_spec(source.directory, path), name)


def _unloaded(model: ComposedForCausalLM, name: str) -> ComposedForCausalLM:
    check_removable("the composition", name, model.config.member_names[1:])
    return without_expert(model, name)
