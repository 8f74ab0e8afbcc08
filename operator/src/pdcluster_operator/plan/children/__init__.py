"""Which steps take a cluster's children to what is desired."""
