"""Figures of a mini-batch for dashboards (--log), on the worker that reports progress."""

from __future__ import annotations

from ..prepare.data import Segment
from ..prepare.devices import peak_bytes
from ..records.metrics import SegmentMetrics
from ..stage.runner import StageRunner


class StepFigures:
    """Makes the figures of one mini-batch after the other, of the same runner."""

    def __init__(self) -> None:
        self._metrics: SegmentMetrics | None = None
        self._loading_s = 0.0

    def __call__(self, runner: StageRunner, segment: Segment, mini_batch: int) -> dict[str, float]:
        """What is known of a mini-batch whose update is done.

        - ``seconds``: of its update, since the one before it in the segment, or since that began;
          of an update after several mini-batches, shared out among them.
        - ``samples``; ``counted``: what counts in its loss, where the task says (tokens, say).
        - ``flops``: of its forwards and backwards, which take twice as many; what is computed again
          doesn't count (PaLM, 2204.02311, appendix B). Where they are known.
        - ``lr``: of the last stage's first parameter group.
        - ``gradient_norm``: of the whole model before clipping, where that is computed anyway.
        - ``memory_bytes``: most that the worker has held so far; of its GPU, all tensors.
        - ``loading_s``: for which the worker has waited for data since the last one.

        Args:
            mini_batch: in the segment.
        """
        metrics, updated = runner.notes.metrics, runner.updated
        together = segment.together(mini_batch)
        found = {
            "seconds": metrics.step_s / together,
            "samples": float(segment.samples_of(mini_batch)),
        }
        if runner.prepared.flops_per_sample is not None:
            found["flops"] = 3 * runner.prepared.flops_per_sample * found["samples"]
        if runner.prepared.model.loss.weighted:
            found["counted"] = metrics.counted
        if updated.lr is not None:
            found["lr"] = updated.lr
        if updated.gradient_norm is not None:
            found["gradient_norm"] = updated.gradient_norm
        on_device, peak = peak_bytes(runner.device), updated.peak
        if on_device is not None or peak is not None:
            found["memory_bytes"] = float(on_device or (peak.total if peak else 0))
        found["loading_s"] = metrics.loading_s
        if metrics is self._metrics:
            found["loading_s"] -= self._loading_s
        self._metrics, self._loading_s = metrics, metrics.loading_s
        return found
