"""Figures for papers: timelines and memory of plans and runs as vector graphics (SVG)."""
