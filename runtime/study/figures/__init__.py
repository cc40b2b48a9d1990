"""A study as data, and all figures as functions of it. Never imports torch."""
