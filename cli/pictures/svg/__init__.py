"""Figures for papers: timelines and memory of plans and runs as vector graphics (SVG).

`options` has the options of commands, `write_plan_figures` and, for a run above its plan,
`write_run_figure`.
"""
