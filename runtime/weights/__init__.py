"""The weight versions a stage keeps: stash, rules, predictions, staleness."""
