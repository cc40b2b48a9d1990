"""Exact cuts by integer linear programs."""
