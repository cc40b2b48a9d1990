"""Studies written by hand: curves whose crossings are known."""

from __future__ import annotations

import msgspec
from helpers.plans import chain_plan
from timeprest.runtime.study.figures.study import (
    PLAIN,
    Curve,
    Study,
    StudyArm,
    StudyQuestion,
    short,
    studied,
)

LENGTH, STEPS = 300, 200


def curve(seed=0, rate=0.1, slow=1.0, phase="final", **more):
    """A loss that falls by a power of the mini-batches done, `slow` times as slowly."""
    losses = tuple(short((1 + (k + 0.5) / slow) ** -0.5 + 0.001 * seed) for k in range(LENGTH))
    given = {"losses": losses, "window": 1, "length": LENGTH, **more}
    return Curve(seed=seed, rate=rate, warmup=0, phase=phase, **given)


def arm(name, slows, kind="pipeline", **more):
    curves = tuple(curve(seed, slow=slow) for seed, slow in enumerate(slows))
    return StudyArm(name=name, kind=kind, rate=0.1, warmup=0, at_edge=False, curves=curves, **more)


def study(arms, periods, memory=None, seeds=3, plans=None, **question):
    """A study with a plan for each arm.

    Args:
        periods: by arm, plain training left out.
        plans: by arm, whose the plans' other figures are.
    """
    plans = plans or {}
    some = next(iter(plans.values()), chain_plan("v-timeprest"))
    asked = {
        "profile": some.profile,
        "task": "mine",
        "mini_batch": 4,
        "steps": STEPS,
        "length": LENGTH,
        "tune_length": LENGTH,
        "seeds": seeds,
        "tune": 1,
        "confirm": 1,
        "rate": 0.1,
        "rate_of": "learning rate",
        "factor": 2.0,
        "warmups": (0,),
        "metric": "loss",
        "eval_every": 0,
        "mixes": False,
        "training": {},
    }
    found = [
        msgspec.structs.replace(
            studied(plans.get(name, some), name, f"{name}.json", name),
            period_s=period,
            memory_bytes=(memory or {}).get(name, 1),
        )
        for name, period in periods.items()
    ]
    return Study(
        question=StudyQuestion(**{**asked, **question}), arms=tuple(arms), plans=tuple(found)
    )


PLAIN_ARM = arm(PLAIN, (1.0, 1.1, 0.9), "plain")
