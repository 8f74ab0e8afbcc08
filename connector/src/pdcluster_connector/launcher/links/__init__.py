"""The links of this engine, and the canaries that prove them."""
