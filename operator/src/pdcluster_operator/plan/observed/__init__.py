"""What is known of a cluster: its engines, pods, links and routers."""
