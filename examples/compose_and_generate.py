"""Compose models that share a base and generate: python examples/compose_and_generate.py BASE EXPERT… --prompt TEXT

Members are hub ids, folders, or folders of LoRA adapters. `tessellm demo letters` leaves some in demo/members.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tessellm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("experts", nargs="+")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    model = tessellm.compose(arguments.base, {Path(expert).name: expert for expert in arguments.experts})
    inputs = model.tokenizer(arguments.prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens)
    print(model.tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
