"""Metal's language for NVRTC: types, math, simdgroups, atomics, matrices and tiles, in `*.cuh`."""
