"""What a run writes and reads back: its directory, metrics, operation logs, progress."""
