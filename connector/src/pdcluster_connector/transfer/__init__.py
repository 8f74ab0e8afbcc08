"""The thread that receives KV: it connects, reads, and reports how each receive ended."""
