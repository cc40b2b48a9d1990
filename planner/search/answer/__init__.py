"""What comes of a search: why nothing fits, and plans that were checked and signed."""
