"""What the backward pass stores, and what it computes again."""
