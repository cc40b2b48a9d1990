"""The relaxed problem of a branch: what every plan costs at the least, or is likely to."""
