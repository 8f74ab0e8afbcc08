"""The Kubernetes operator of pdcluster: a PDCluster becomes a serving endpoint."""

__version__ = "0.1.0"
