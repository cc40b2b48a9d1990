"""Devices and links: cluster files, contention between devices, lines through measured links."""
