"""Whole training runs in each precision, whose ends are compared with float32's."""
