"""What reaches outside of the process: the API server, engines, certificates, logs and metrics."""
