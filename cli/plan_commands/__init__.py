"""The commands of tp-plan."""
