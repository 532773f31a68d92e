"""One file for each example; `get_config()` returns its settings."""
