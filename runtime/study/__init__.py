"""Studies: which of several plans reaches a loss first (tp-run study)."""
