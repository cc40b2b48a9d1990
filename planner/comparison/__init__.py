"""Several plans of one request, and what none of them beats in everything."""
