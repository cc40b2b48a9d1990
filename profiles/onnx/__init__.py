"""Importers: models from files as traceable torch modules."""
