"""Schedules: which operations each stage runs, in which sequence, and what they settle into."""
