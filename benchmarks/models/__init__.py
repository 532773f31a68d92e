"""The models of the benchmarks: plain Flax, as a user writes them."""
