"""A schedule on the clock: the pipeline, its messages, its times."""
