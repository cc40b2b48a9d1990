"""Profiles, plans and runs as they show themselves, in notebooks above all."""
