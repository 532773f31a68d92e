"""Every optimizer of `flax_amp.optim` under every transformation of JAX."""
