"""The commands tp-profile, tp-plan and tp-run, and the tables and pictures that they make."""
