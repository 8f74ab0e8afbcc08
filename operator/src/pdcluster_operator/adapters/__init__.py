"""What speaks to the API server, to engines and to files."""
