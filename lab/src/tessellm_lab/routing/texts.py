"""Keep the text vectors of all prompts and descriptions beside their features.

python -m tessellm_lab.routing.texts --data DATA --out CACHE      (a folder that tessellm_lab.routing.features filled)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from tessellm.members import Loading, MemberSpec, load_member
from tessellm.routing.text import MINILM, Embedder, SentenceModel, TokenVectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    about = json.loads((arguments.out / "about.json").read_text())
    descriptions = json.loads((arguments.data / "real2" / "descriptions.json").read_text())
    member = load_member("base", MemberSpec("smollm2"), None, Loading(dtype="float32"))
    base: Any = member.model
    table, tokenizer = base.get_input_embeddings().weight, cast(Any, member.tokenizer)
    calibration = [ids for ids, part in zip(about["ids"], about["part"], strict=True) if part == "calibration"]
    embedders: dict[str, Embedder] = {
        "tokens": TokenVectors.fit(table, calibration),
        "sentences": SentenceModel(MINILM, tokenizer),
    }
    vectors = {}
    for key, embedder in embedders.items():
        vectors[f"{key}/prompts"] = embedder.embed(about["ids"]).numpy()
        for kind, texts in descriptions.items():
            rows = [tokenizer(texts[name], add_special_tokens=False).input_ids for name in about["experts"]]
            vectors[f"{key}/{kind}"] = embedder.embed(rows).numpy()
    np.savez(arguments.out / "texts.npz", allow_pickle=False, **vectors)


if __name__ == "__main__":
    main()
