"""ResNet-50 on ImageNet, data parallel over all devices of a machine."""
