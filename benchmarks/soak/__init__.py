"""A long run with faults, kills and restarts, and the model that it must agree with."""
