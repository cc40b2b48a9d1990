"""One self-contained page that shows plans and runs."""
