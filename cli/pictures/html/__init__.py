"""A self-contained HTML page of plans and runs."""
