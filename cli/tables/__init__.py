"""Plans, profiles and runs as tables in the terminal."""
