"""Cuts for schedules over micro-batches, by what their stages wait for."""
