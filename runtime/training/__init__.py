"""Training: the loop over epochs, in processes and inline."""
