"""Profiles that Sailor's authors measured (SOSP'25), as a satellite."""
