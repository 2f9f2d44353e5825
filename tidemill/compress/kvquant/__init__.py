"""Calibration of KVQuant, a format of the KV cache: from a model and a text to the constants that
its kernels use."""
