"""What each layer costs: bytes counted, times measured or computed."""
