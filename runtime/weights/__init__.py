"""The weight versions a stage keeps: stash, policy, predictions, staleness."""
