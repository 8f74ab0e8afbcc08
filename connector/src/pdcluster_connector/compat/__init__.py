"""Whether two engine shapes can exchange KV: the rules that admission and the handshake share."""
