"""Parameters and gradients for an optimizer."""

import jax.numpy as jnp

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 7, "b": jnp.ones(2)}
GRADS = {"w": jnp.full((3, 2), 0.3), "b": jnp.full(2, -0.2)}
