"""The training systems, in one table: how they order work and which weights each pass uses.

Rules are names; `orders` and `versions` hold what the names mean. Adding a system is a row
here, and at most one small rule there. docs/systems.md explains each row and its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..profiles.errors import PlanError

OrderRule = Literal["gpipe", "1f1b", "nf1b"]
BackwardUnit = Literal["micro", "mini"]
ForwardWeights = Literal["latest", "first-micro-batch"]
BackwardWeights = Literal["latest", "forward"]


@dataclass(frozen=True)
class Variant:
    """One training system.

    Attributes:
        order: rule that makes the list of operations (`orders.ORDER_RULES`).
        backward_unit: a backward works through one micro-batch, or a whole mini-batch.
        flushes: the pipeline drains before each update.
        forward_weights: "latest" at each forward, or "first-micro-batch": what was the latest
            when the mini-batch's first micro-batch started at the stage.
        backward_weights: the "latest", or the very ones the "forward" used (stashed).
        whole_mini_batches: the system knows no micro-batches, N is 1.
        summary: one line for people.
    """

    name: str
    order: OrderRule
    backward_unit: BackwardUnit
    flushes: bool
    forward_weights: ForwardWeights
    backward_weights: BackwardWeights
    whole_mini_batches: bool
    summary: str


_TABLE = (
    Variant(
        name="timeprest",
        order="nf1b",
        backward_unit="mini",
        flushes=False,
        forward_weights="first-micro-batch",
        backward_weights="latest",
        whole_mini_batches=False,
        summary="nF1B, backward on the latest weights, nothing stashed for it (2410.14312)",
    ),
    Variant(
        name="v-timeprest",
        order="nf1b",
        backward_unit="mini",
        flushes=False,
        forward_weights="latest",
        backward_weights="latest",
        whole_mini_batches=False,
        summary="nF1B, latest weights in every pass, one copy (2509.23241)",
    ),
    Variant(
        name="pipedream",
        order="1f1b",
        backward_unit="mini",
        flushes=False,
        forward_weights="latest",
        backward_weights="forward",
        whole_mini_batches=True,
        summary="1F1B over mini-batches, weights stashed for the backward (1806.03377)",
    ),
    Variant(
        name="gpipe",
        order="gpipe",
        backward_unit="micro",
        flushes=True,
        forward_weights="latest",
        backward_weights="latest",
        whole_mini_batches=False,
        summary="all forwards, all backwards, flush: plain mini-batch training (1811.06965)",
    ),
)

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _TABLE}


def variant_named(name: str) -> Variant:
    """The system of this name. Raises PlanError listing the known ones."""
    try:
        return VARIANTS[name]
    except KeyError:
        raise PlanError(f"unknown system {name!r}; known are {', '.join(VARIANTS)}") from None
