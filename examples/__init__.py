"""Examples, each self-contained in its folder: copy one and change it."""
