"""A GPT on the characters of Python's standard library, in Linen and in NNX."""
