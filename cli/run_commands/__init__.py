"""The commands of tp-run."""
