"""Plans as other engines read them. Never imports torch."""
