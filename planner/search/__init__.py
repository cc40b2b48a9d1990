"""The search around the exact problem: stage counts, micro-batches, limits, bounds."""
