"""Which operator works on a PDCluster, and from when on."""
