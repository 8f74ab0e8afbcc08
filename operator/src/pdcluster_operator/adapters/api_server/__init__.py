"""Everything that speaks to the API server, and what answers its admission reviews."""
