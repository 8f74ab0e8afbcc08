"""Kubernetes objects as such: who owns one, what is kept of it, whether it is still as wanted."""
