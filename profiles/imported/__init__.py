"""Profiles made of numbers: tables of costs, networkx graphs, and files that plugins import."""
