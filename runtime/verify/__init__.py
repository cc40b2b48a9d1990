"""Checks of a run: against plain training, and before it starts."""
