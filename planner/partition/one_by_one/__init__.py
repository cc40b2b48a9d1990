"""Cuts for 1F1B over micro-batches on identical devices, by what its stages wait for."""
