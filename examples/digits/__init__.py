"""Handwritten digits with a convolutional network: the whole way, small."""
