"""Mixed precision as a transform: trace, paint, emit."""
