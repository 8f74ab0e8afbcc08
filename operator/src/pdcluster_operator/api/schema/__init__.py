"""The OpenAPI schema of the CRDs, made from the spec's types."""
