"""`make bench`: the connector beside vLLM's NixlConnector and NIXL's own API, in one run."""
