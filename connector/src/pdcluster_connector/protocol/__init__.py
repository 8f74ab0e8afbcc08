"""What engines tell each other: handshakes, tickets, leases. And the states of a receive."""
