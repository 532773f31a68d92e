"""A long run in float16 that is killed, fed bad batches and damaged on its disk."""
