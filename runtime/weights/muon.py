"""Muon for the matrices of hidden layers, and AdamW for all else, as one optimizer.

Muon orthogonalises its momentum, so its steps have a size of their own. They are scaled to those of
AdamW, by 0.2·√(the larger dimension) (2502.16982): one learning rate and one weight decay do for
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

ADJUST = "match_rms_adamw"
"""What torch calls that scale."""


class MuonWithAdamW(Optimizer):
    """Steps both; its groups and its state are theirs."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        matrices: Iterable[nn.Parameter],
        *,
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
    ) -> None:
        """
        Args:
            groups: as torch's optimizers take them.
            matrices: which of their parameters are Muon's.
            muon, adamw: options of each.
        """
        keys = {id(p) for p in matrices}
        hidden: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            for found, among in ((hidden, True), (others, False)):
                params = [p for p in group["params"] if (id(p) in keys) is among]
                # Also where it is empty: groups go by their places.
                found.append({**group, "params": params})
        self._parts: list[Optimizer] = [
            torch.optim.Muon(hidden, adjust_lr_fn=ADJUST, **muon),
            AdamW(others, **adamw),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        left = iter(self.param_groups)
        for part in self._parts:
            # The same groups, so that both see what a scheduler makes of their rates.
            part.param_groups = [next(left) for _ in part.param_groups]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch ends the loading of a state with it, which makes new groups."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def is_muons(group: Mapping[str, Any]) -> bool:
    """Whether a group of parameters is stepped by Muon."""
    return "ns_steps" in group


def orthogonal_step(momentum: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What Muon would step along with this momentum, weight decay left out: by torch's own
    orthogonalisation and scale, a step from zero by a rate of one, the momentum as a gradient."""
    stepped = nn.Parameter(torch.zeros_like(momentum))
    stepped.grad = momentum
    rule = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon(
        [stepped], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **rule
    ).step()
    return stepped.detach().neg_()
