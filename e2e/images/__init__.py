"""The container images of the end-to-end tests, built on this machine without a registry."""
