"""The kernels of the forward pass, one package per family, each with its `reference.py`."""
