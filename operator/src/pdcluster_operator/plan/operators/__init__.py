"""Which operator works on a PDCluster, and when."""
