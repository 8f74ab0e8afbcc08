"""`pdcluster up`: a PDCluster as processes on this machine, without Kubernetes."""
