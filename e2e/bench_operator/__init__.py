"""How fast the operator is with many PDClusters, on a real API server with simulated pods."""
