"""Doing it: splitting, weight versions, stages, channels, workers, launching, metrics."""
