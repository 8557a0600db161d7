# %% [markdown]
# # The first ten minutes
#
# Six LoRA adapters of one chat model, as one model. In a clone, `make demo` has installed what this needs; run it from
# `examples/`. `first_ten_minutes.ipynb` is made of `first_ten_minutes.py` by `python docs/generate.py`.

# %%
import os

from transformers import AutoModelForCausalLM

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.load import load_model

MODEL = os.environ.get("TESSELLM_MODEL", "../adapters/smollm2")  # a folder of adapters, a recipe or a checkpoint
NEW_TOKENS = int(os.environ.get("NEW_TOKENS", "48"))

model = load_model(MODEL)
tokenizer = model.tokenizer
print(*model.config.member_names, f"rule: {model.rule.name}", sep="\n")

# %% [markdown]
# ## Which members should answer?
#
# The router decides from the base's own forward pass. No expert runs for it.

# %%
PROMPTS = [
    "How many legs do 4 cats have?",
    "Give a bash command for this: Find all SUID set files",
    "What is the capital of Norway?",
]
for prompt in PROMPTS:
    route = model.route(prompt)
    print(f"{route.selected}: {prompt}", {name: round(share, 2) for name, share in route.prior.items()})

# %% [markdown]
# ## Answer
#
# The composition is a causal language model of Hugging Face's: `generate`, `pipeline`, streamers, all of it.


# %%
def answer(prompt):
    """The prompt in the chat template, and the ids of prompt and answer."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return inputs["input_ids"], model.generate(**inputs, max_new_tokens=NEW_TOKENS)


for prompt in PROMPTS:
    prompt_ids, ids = answer(prompt)
    print(tokenizer.decode(ids[0, prompt_ids.shape[1] :], skip_special_tokens=True), end="\n\n")

# %% [markdown]
# ## Which member wrote it?
#
# A trace reads a text again and says for each token which member owns it.

# %%
prompt_ids, ids = answer(PROMPTS[1])
trace = tessellm.trace(model, ids)
start = prompt_ids.shape[1]
for token, owner in zip(ids[0, start:].tolist(), trace.owner[0, start:].tolist(), strict=True):
    print(f"{model.config.member_names[owner]:>10} {tokenizer.decode([token])!r}")

# %% [markdown]
# ## Many prompts at once
#
# The engine batches requests and runs only the members that answer each.

# %%
engine = Engine(model, slots=4)
texts = [
    tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
    for prompt in PROMPTS
]
for request in engine.generate(texts, Sampling(max_new_tokens=NEW_TOKENS)):
    print(request.route.active() if request.route else "not routed", tokenizer.decode(request.tokens))

# %% [markdown]
# ## Another rule, and a checkpoint
#
# `product` is Eq. 2 of arXiv 2605.28304: every expert is part of every token. A saved composition loads as any causal
# language model does.

# %%
model.save_pretrained("composed")
model.set_rule("product")
_, ids = answer(PROMPTS[0])
print("Eq. 2:", tokenizer.decode(ids[0], skip_special_tokens=True))

again = AutoModelForCausalLM.from_pretrained("composed")
print(again.rule.name, *again.config.member_names)
