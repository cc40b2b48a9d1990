"""Training systems from outside: rows of the table, with rules, in a file or package of a user's.

`SYSTEMS` of a plugin (`profiles.plugins`) are rows (`Variant`); a row has an `Outside` for what no
row of the table can say. The file itself shouldn't import torch where planning is to do without:
rules are made in the process that trains. docs/plugins.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...profiles.errors import PluginError
from ...profiles.plugins import call_plugin
from .hooks import StageHooks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class StageContext:
    """What a rule may know of its stage.

    Attributes:
        stage: its number, 0 the input side.
        stages: S.
        micro_batches: N.
        replicas: of the stage.
        updates: that the run will make; None while planning.
        delay: d, the stage's largest version difference in the steady state; None while planning.
    """

    stage: int
    stages: int
    micro_batches: int
    replicas: int = 1
    updates: int | None = None
    delay: int | None = None


class StageRules(StageHooks):
    """What a system does with one stage's weights; made once in each process that trains it.

    Attributes:
        context: of the stage.
        parameters: that it trains.
        kept: all tensors are there from the beginning, for parameters of these.
    """

    makes = "outside"

    def __init__(self, context: StageContext, parameters: Sequence[nn.Parameter]) -> None:
        self.context = context
        self.parameters = tuple(parameters)
        self.kept: dict[str, dict[nn.Parameter, Tensor]] = {}


@dataclass(frozen=True)
class Outside:
    """What a system from outside does that no row of the table says.

    Attributes:
        rules: makes a stage's; None: none are needed.
        update: the optimizer to step, from the user's.
        copies: of a stage's parameters that are held besides weight versions: what rules keep, and
            one that "outside" weights are written to.
        passes: over a stage's parameters that each update takes besides the optimizer's step, what
            makes "outside" weights, and one where those are of backwards; each takes as long as
            mixing two versions into a third.
        plugin: where it is from; filled in.
        checksum: of that file's content, or of the package's module; filled in.
    """

    rules: Callable[[StageContext, Sequence[nn.Parameter]], StageRules] | None = None
    update: Callable[[StageContext, Optimizer], Optimizer] | None = None
    copies: Callable[[StageContext], int] = lambda _: 0
    passes: float = 0.0
    plugin: str = field(default="", compare=False)
    checksum: str = field(default="", compare=False)

    @property
    def acts(self) -> bool:
        """Whether anything of it runs while training; the row is one of known words else."""
        return self.rules is not None or self.update is not None

    def copies_on(self, context: StageContext) -> int:
        """As declared. Raises PluginError where that fails, or for what is no number of copies."""
        found = call_plugin(
            self.plugin, lambda: self.copies(context), f"copies for stage {context.stage}"
        )
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise PluginError(
                f"{self.plugin}: copies gives {found!r} for stage {context.stage}; give a whole "
                "number from 0"
            )
        return found
