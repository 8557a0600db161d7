"""Styles and anti-experts: python examples/steer_away.py BASE STYLE ANTI --prompt TEXT

STYLE is part of every answer; a negative weight steers away from ANTI. Both are columns of W that are non-zero in every
component, so with these alone the rule is `product`.
"""

from __future__ import annotations

import argparse

import tessellm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("style")
    parser.add_argument("anti")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    experts = {"style": {"source": arguments.style, "style": True}, "anti": {"source": arguments.anti, "weight": -0.5}}
    model = tessellm.compose(arguments.base, experts)
    inputs = model.tokenizer(arguments.prompt, return_tensors="pt")
    for weights in ([0.0, 0.0], [1.0, -0.5]):
        model.set_rule(weights=weights)
        output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens)
        print(weights, model.tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
