"""Figures for papers: timelines and memory of plans and runs as vector graphics (SVG).

`options` has the options of commands, `write_plan_figures` and, for a run above its plan,
`write_run_figure`.
"""

from .frame import FigureSettings
from .memory import memory_svg
from .timeline import timeline_svg, timelines_svg

__all__ = ["FigureSettings", "memory_svg", "timeline_svg", "timelines_svg"]
