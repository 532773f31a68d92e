"""The variants of `examples/imagenet`; each changes a few settings of `default`."""
