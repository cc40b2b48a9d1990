"""Improving plans: where a plan can move to, and the descent over its moves."""
