"""What stages cost: times, bytes, messages, memory over a schedule, tied parameters."""
