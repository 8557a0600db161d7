"""How cold and how hot sampling may be: beyond, log-probabilities over the temperature overflow or vanish."""

from __future__ import annotations

from ..errors import GenerationError

COLDEST = 1e-4
HOTTEST = 1e4


def check_temperature(temperature: float) -> None:
    """0 stands for greedy decoding."""
    if not (temperature == 0 or COLDEST <= temperature <= HOTTEST):
        raise GenerationError(
            f"expected a temperature of 0, which decodes greedily, or from {COLDEST:g} to {HOTTEST:,.0f}; "
            f"got {temperature:g}"
        )
