"""One stage's compute: forward, backward, update, and what it accounts for."""
