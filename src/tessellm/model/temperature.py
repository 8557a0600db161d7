"""How cold sampling may be: below this, log-probabilities over the temperature overflow and no law is left."""

from __future__ import annotations

from ..errors import GenerationError

COLDEST = 1e-4


def check_temperature(temperature: float) -> None:
    """0 stands for greedy decoding."""
    if not (temperature == 0 or COLDEST <= temperature < float("inf")):
        raise GenerationError(
            f"expected a temperature of 0, which decodes greedily, or of at least {COLDEST:g}; got {temperature}"
        )
