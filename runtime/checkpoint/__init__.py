"""Checkpoints: what a worker saves, where a run goes on, exports."""
