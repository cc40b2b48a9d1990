"""A plan and a task become each worker's part: pieces, data, devices, messages."""
