"""Tensors between workers: channels, transports, all-reduces."""
