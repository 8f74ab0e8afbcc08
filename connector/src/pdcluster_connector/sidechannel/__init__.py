"""The HTTP server and clients between the engines of a cluster."""
