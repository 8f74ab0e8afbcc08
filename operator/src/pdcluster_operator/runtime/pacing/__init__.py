"""When a PDCluster is reconciled and when a call is sent: the queue, fair shares, and pauses."""
