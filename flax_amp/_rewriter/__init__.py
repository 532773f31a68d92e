"""Mixed precision as a transform: trace, flatten, plan, emit."""
