"""Figures for papers: timelines and memory of plans and runs as vector graphics (SVG)."""

from .frame import Settings
from .memory import memory_svg
from .timeline import timeline_svg, timelines_svg

__all__ = ["Settings", "memory_svg", "timeline_svg", "timelines_svg"]
