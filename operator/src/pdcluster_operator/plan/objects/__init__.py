"""Functions over any Kubernetes object: its owner, the fields that are kept, its drift."""
