"""Talking about it: the three commands and what they print."""
