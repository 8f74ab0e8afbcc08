"""Which bytes of a peer go where: from two shapes to descriptors."""
