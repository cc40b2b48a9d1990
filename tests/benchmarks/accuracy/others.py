"""Two more public sets of measurements, in which layers' times aren't known: what one run says of
another.

torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (31a17bf), table 5: tokens per second and
GPU of Llama 3.1 405B on 512 H100s, 8 stages, all activations computed again. It doesn't say how
many micro-batches there were: torchtitan's pipelining_utils.py has as many as ranks, unless told.

CCL-Bench (cornell-sysphotonics/ccl-bench, 1d257f0), agent/ccl_bench_agent/runs: seconds of a step
of Llama 3.1 8B in Megatron-LM, 8 and 16 A100s in nodes of 4. Batches are those of its workload
cards (8 and 16 samples), which the times fit; its run.sh has by now dp × micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from timeprest.planner.engine_costs import ENGINE_COSTS, on_engine
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.systems.variants import variant_named

TITAN_TOKENS_PER_S = {"pipedream-flush": 100.0, "interleaved-1f1b": 128.0}


class Foretold(NamedTuple):
    """What was predicted of a run, by which others, and what was measured, once or oftener."""

    what: str
    by: str
    predicted: float
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """As a share, of the median."""
        return self.predicted / median(self.measured) - 1


@dataclass(frozen=True)
class Megatron:
    """A run of CCL-Bench, four ranks of a tensor-parallel group being a device."""

    stages: int
    replicas: int
    micro_batch: int
    mini_batch: int
    seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"tp 4, pp {self.stages}, dp {self.replicas}, micro-batch {self.micro_batch}"

    def pipeline(self, micro_batch_s: float, sums_s: float = 0.0) -> Pipeline:
        """`micro_batch_s`: a micro-batch's forward and backward on the whole model."""
        stages = range(self.stages)
        each = micro_batch_s / self.stages
        replicas = (1.0,) * self.replicas
        return Pipeline(
            variant=variant_named("pipedream-flush"),
            micro_batches=self.mini_batch // self.micro_batch,
            forward_s=(each / 3,) * self.stages,
            backward_s=(each * 2 / 3,) * self.stages,
            update_s=(0.0,) * self.stages,
            links=() if self.replicas > 1 else tuple(_link(s) for s in stages[:-1]),
            limits=(1,) * self.stages,
            paces=(replicas,) * self.stages if self.replicas > 1 else (),
            all_reduce_s=(sums_s,) * self.stages,
        )

    def period_s(self, micro_batch_s: float, sums_s: float = 0.0) -> float:
        """In Megatron-Core's run."""
        pipeline = self.pipeline(micro_batch_s, sums_s)
        return steady_state(on_engine(pipeline, ENGINE_COSTS["megatron"])).period_s


def _link(s: int) -> Link:
    return Link(s, s + 1, 0.0, 0.0, 0.0)


KNOWN = {
    size: Megatron(2, 1, size, 8, seconds) for size, seconds in ((1, (0.4866,)), (2, (0.4743,)))
}
"""By micro-batch: on 8 GPUs, without replicas."""

SUMMED = Megatron(1, 2, 1, 8, (5.889,))
"""With replicas on two nodes: what sums between nodes take."""

JUDGED = (
    Megatron(4, 1, 1, 16, (0.4747, 0.4427)),
    Megatron(4, 1, 2, 16, (0.4707,)),
    Megatron(1, 4, 2, 16, (8.697, 8.358)),
    Megatron(2, 2, 1, 16, (3.409, 3.339)),
)


def titan() -> Foretold:
    """How many times as many tokens interleaved stages give, two on each rank."""
    plain = Pipeline(
        variant=variant_named("pipedream-flush"),
        micro_batches=8,
        forward_s=(1.0,) * 8,
        backward_s=(3.0,) * 8,
        update_s=(0.0,) * 8,
        links=tuple(_link(s) for s in range(7)),
        limits=(1,) * 8,
    )
    looped = replace(
        plain,
        variant=variant_named("interleaved-1f1b"),
        forward_s=(0.5,) * 16,
        backward_s=(1.5,) * 16,
        update_s=(0.0,) * 16,
        links=tuple(_link(s) for s in range(15)),
        limits=(1,) * 16,
        placement=(*range(8), *range(8)),
    )
    ratio = steady_state(plain).period_s / steady_state(looped).period_s
    measured = TITAN_TOKENS_PER_S["interleaved-1f1b"] / TITAN_TOKENS_PER_S["pipedream-flush"]
    what = "torchtitan, 405B on 512 H100s: tokens/s of interleaved 1F1B over 1F1B's"
    return Foretold(what, "equal stages, as many micro-batches as ranks", ratio, (measured,))


def ccl_bench() -> Iterator[Foretold]:
    """Seconds of a step on 16 GPUs, by runs on 8."""
    micro_batch_s = {size: median(run.seconds) / run.period_s(1.0) for size, run in KNOWN.items()}
    left_s = median(SUMMED.seconds) - SUMMED.period_s(micro_batch_s[SUMMED.micro_batch])
    for run in JUDGED:
        # A ring passes 2 (r - 1) / r of a stage's gradients on.
        share = 2 * (run.replicas - 1) / run.replicas / run.stages
        found = run.period_s(micro_batch_s[run.micro_batch], left_s * share)
        by = f"{KNOWN[run.micro_batch].name}, on 8 GPUs"
        by += f"; sums by {SUMMED.name}" if run.replicas > 1 else ""
        yield Foretold(f"CCL-Bench, Llama 8B on 16 A100s: {run.name}", by, found, run.seconds)
