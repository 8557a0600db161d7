"""Four small experts, two of which want different letters in the same place: the diagnosis finds them.

python lab/examples/diagnose_a_contradiction.py report.html      # trains for about a minute, then writes the report
"""

import sys
from pathlib import Path

import tessellm
from tessellm_lab.letters_demo.letters import build_tokenizer, fine_tune, train_base

PROMPTS = [
    "HELLO MATH", "TOMATO JAM", "MARMALADE", "TEAM MATE", "I AM HERE", "QUICK FOX", "BIG CAT", "A MAP", "NORTH WIND",
    "WE SING", "LATE TRAM", "OPEN DOOR", "THE MOON", "YELLOW INK", "GREEN TEA",
]  # fmt: skip
SKILLS = {"a_to_k": {"A": "K"}, "m_to_b": {"M": "B"}, "t_to_x": {"T": "X"}, "a_to_z": {"A": "Z"}}

base = train_base(seed=0)
experts = {name: fine_tune(base, skill, seed=number) for number, (name, skill) in enumerate(SKILLS.items(), 1)}
model = tessellm.compose(base, experts, rule="product")
model.tokenizer = build_tokenizer()
diagnosis = tessellm.diagnose(model, [f"{prompt}>" for prompt in PROMPTS], max_new_tokens=16)
for advice in diagnosis.advice:
    print("•", advice.text)
Path(sys.argv[1]).write_text(diagnosis.to_html(), encoding="utf-8")
