"""Hugging Face models as targets, by name, folder or config: ``hf:NAME``."""
