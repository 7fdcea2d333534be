// What `#include <metal_stdlib>` and its parts declare, as far as MLX and our kernels use it. In our own words,
// after the Metal Shading Language Specification.
#pragma once
#include "metal_types.h"
#include "metal_math.h"
#include "metal_simdgroup.h"
