"""Views of a cluster: its engines, pods, links and routers, from live objects and reports."""
