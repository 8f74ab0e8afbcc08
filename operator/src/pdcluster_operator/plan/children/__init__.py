"""The steps that take the objects of a PDCluster, its children, to what is desired."""
