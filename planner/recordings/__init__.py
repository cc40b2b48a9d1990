"""What a schedule did or should do, operation by operation."""
