"""What engines tell each other: handshakes, tickets, leases, and the states of a receive."""
