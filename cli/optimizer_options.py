"""tp-run's options that name an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..profiles.errors import UserError

if TYPE_CHECKING:
    from ..runtime.settings import OptimizerChoice


def optimizer_choice(name: str | None, options: dict[str, Any]) -> OptimizerChoice | None:
    """The optimizer that is named, with what is given of its options. Raises UserError."""
    from ..runtime.settings import OptimizerChoice

    given = {option: value for option, value in options.items() if value is not None}
    if name is None:
        if given:
            extra = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise UserError(f"{extra}: name the --optimizer too")
        return None
    if "lr" not in given:
        raise UserError(f"--optimizer {name}: give its --lr too")
    return OptimizerChoice(name=name, **given)


def betas_in(text: str | None) -> tuple[float, float] | None:
    """``"0.9,0.999"`` → (0.9, 0.999). Raises UserError."""
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise UserError(f"--betas {text!r}: give two numbers from 0 to 1, like 0.9,0.999") from None
    return first, second
