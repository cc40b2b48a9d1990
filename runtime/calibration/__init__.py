"""Measurements of the machine that trains: links, and what a stage takes besides its layers."""
