"""On a CUDA device: the same composition as on the CPU, members on several devices, bfloat16. Run: make test-gpu"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import tessellm
from tessellm.diagnose.recorder import Recorder

from families import NAMES, family, random_ids

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[["llama"] * 3, ["gemma2"] * 3, ["qwen2", "gpt2", "llama"]], ids=str)
def models(request):
    return family(request.param)


def on(models: list, devices: list[str]) -> tessellm.ComposedForCausalLM:
    moved = [copy.deepcopy(model).to(device) for model, device in zip(models, devices, strict=True)]
    return tessellm.compose(moved[0], dict(zip(NAMES, moved[1:], strict=False)))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Where the host may not wait for the device. PyTorch warns that this mode is not complete, whenever it is set."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("devices", [["cuda"] * 3, ["cuda", "cpu", "cuda"], ["cpu", "cuda", "cpu"]], ids=str)
def test_equals_the_cpu(models, devices):
    ids = random_ids()
    here, there = on(models, ["cpu"] * 3), on(models, devices)
    logits = there(ids.to(there.device)).logits
    assert logits.device.type == devices[0]
    torch.testing.assert_close(logits.cpu(), here(ids).logits, rtol=0, atol=2e-4)
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = here.generate(ids, **options)
    options["attention_mask"] = options["attention_mask"].to(there.device)
    for more in ({}, {"num_beams": 1, "cache_implementation": "static", "disable_compile": True}):
        got = there.generate(ids.to(there.device), **options, **more).cpu()
        assert (got == expected).float().mean() > 0.95  # ties apart


@torch.no_grad()
def test_bfloat16_on_the_device(models):
    model = on([copy.deepcopy(model).to(torch.bfloat16) for model in models], ["cuda"] * 3)
    ids = random_ids().cuda()
    logits = model(ids).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones_like(logits[..., 0]), rtol=0, atol=1e-4)
    assert model.generate(ids, max_new_tokens=8, num_beams=3, attention_mask=torch.ones_like(ids)).shape[1] <= 32


@torch.inference_mode()
@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_watching_a_step_never_waits_for_the_device(models, rule):
    moved = [copy.deepcopy(model).cuda() for model in models]
    experts = dict(zip(NAMES, moved[1:], strict=False))
    weights = dict.fromkeys(experts, 0.8)
    model = tessellm.compose(moved[0], experts, rule=rule, weights=weights)
    recorder, shape = Recorder(model, last_only=True), (2, 1, model.config.vocab_size)
    logp_MBTV = torch.randn(3, *shape, device="cuda").log_softmax(-1)
    tokens_BT = torch.ones(2, 1, dtype=torch.long, device="cuda")
    composed_BTV, _, why = model.rule.explain(logp_MBTV, tokens_BT, tokens_BT.bool(), None)
    recorder(logp_MBTV, tokens_BT, composed_BTV, why)  # what is copied to the device once is there now
    with waiting_is_an_error():
        recorder(logp_MBTV, tokens_BT, composed_BTV, why)
    assert recorder.finish(tokens_BT)["owner"].shape == (2, 2)


@torch.no_grad()
def test_moving_keeps_one_copy_of_shared_tensors(models):
    from tessellm.members.adapters import share

    base = copy.deepcopy(models[0])
    model = tessellm.compose(base, {"one": share(base), "two": share(base)})
    model.to("cuda")
    places = {parameter.data_ptr() for member in model.members.values() for parameter in member.parameters()}
    assert len(places) == len(list(base.parameters()))
    assert model.device.type == "cuda"
