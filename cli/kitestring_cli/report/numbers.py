"""How a report writes numbers. Pure."""

from __future__ import annotations


def number(value: float) -> str:
    """A number as short as it can be read."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if size < 1e3 else f"{value:,.0f}"
