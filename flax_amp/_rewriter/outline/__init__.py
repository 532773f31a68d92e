"""Equal layers of an unrolled network, rewritten once."""
