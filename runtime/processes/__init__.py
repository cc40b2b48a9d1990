"""Worker processes: launcher, rendezvous, heartbeats, error messages, locks."""
