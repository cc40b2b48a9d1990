"""The dry run: everything that can be known before training, on every host; nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...profiles.files import check_writable
from ...profiles.tasks.hooks import before_training
from ..checkpoint.start import check_settings
from ..checkpoint.trial import try_kept
from ..prepare.devices import device_of, devices_here
from ..prepare.prepare import prepare
from ..prepare.tracing import is_small
from ..processes.environment import LOOPBACK, use_interface
from ..records.metric_logs import check_logs_at_hand
from ..records.run_dir import RunDir
from ..weights.delays import check_delays
from .cuts import check_shapes, send_over_cuts
from .findings import DryRun, PlaceAndHost, findings, place_and_host
from .hooks import try_in_parts, try_training
from .trial import NOT_TRIED, try_plan

if TYPE_CHECKING:
    from ...planner.plan import Plan
    from ..processes.rendezvous import Rendezvous
    from ..settings import RunSettings


def dry_run(
    plan: Plan, settings: RunSettings, run_dir: str, rendezvous: Rendezvous | None = None
) -> DryRun | None:
    """Check all that a run needs, and send a micro-batch's shapes through every cut.

    Under torchrun or srun every host looks at itself, and a message goes over every cut.

    Returns:
        The findings; None on workers that aren't the one that reports.

    Raises: as `run`, for what makes a run impossible; TargetError where hooks or stages fail.
    """
    settings = check_settings(settings)
    if rendezvous is None:
        check_logs_at_hand(settings)
    check_delays(plan, settings)
    kind, gpus = devices_here(plan, settings)
    where = RunDir(run_dir)
    where.check_new()
    check_writable(where.path / "plan.json")
    launched = None if rendezvous is None else rendezvous.launched
    address = LOOPBACK if launched is None else use_interface(launched)
    with before_training():
        prepared = prepare(plan, settings)
        kept = try_kept(prepared)
        result, target = check_shapes(prepared)
        worker = None if rendezvous is None else prepared.workers[rendezvous.rank]
        if is_small(plan):
            warnings = try_training(prepared)
            if worker is None or worker.is_reporter:
                warnings += try_plan(prepared)
        else:
            only = range(len(plan.stages)) if worker is None else worker.stages
            warnings = try_in_parts(prepared, result, target, only)
            warnings.append(f"{settings.task}: {NOT_TRIED}: it is too large for a look")
    warnings += kept

    def place(rank: int, local_rank: int) -> PlaceAndHost:
        return place_and_host(prepared, rank, device_of(kind, local_rank, gpus), address, where)

    if rendezvous is None:
        places = [place(rank, rank) for rank in range(len(prepared.workers))]
    else:
        mine = place(rendezvous.rank, rendezvous.launched.local_rank)
        texts = rendezvous.gather("dry run", msgspec.json.encode(mine))
        send_over_cuts(prepared, rendezvous)
        if not prepared.workers[rendezvous.rank].is_reporter:
            return None
        places = [msgspec.json.decode(text, type=PlaceAndHost) for text in texts]
    return findings(prepared, places, launched, warnings)
