"""Many trainings for a study: inline, with exact versions, in parallel processes."""
