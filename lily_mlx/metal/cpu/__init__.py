"""The parts of the `cpu` backend: C++ translation, compiler and cache, and the C++ runtime."""
