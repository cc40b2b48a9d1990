"""Studies: how much training each system needs, and what that costs on a cluster."""
