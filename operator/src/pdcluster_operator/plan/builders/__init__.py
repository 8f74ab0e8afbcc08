"""The objects of a cluster, each made from its spec."""
