"""`Kernel`: what a call checks before anything runs, and the choice of the backend."""

import mlx.core as mx
import pytest

from lily_mlx import metal
from lily_mlx.metal import BackendError, Kernel, SourceError
from lily_mlx.metal.launch import float_constants

SCALE = Kernel.from_source(
    "scale", ["x"], ["out"], "uint i = thread_position_in_grid.x; out[i] = T(float(x[i]) * FACTOR * N);"
)


def call(kernel=SCALE, **changes):
    arguments = {
        "inputs": [mx.ones((64,))],
        "template": {"T": mx.float32, "N": 2, "FACTOR": 0.5},
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
    }
    return kernel(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, r"scale takes 1 inputs \('x',\), got 0"),
        ({"output_shapes": []}, r"1 outputs \('out',\), got 0 shapes"),
        (
            {"grid": (65, 1, 1)},
            r"grid \(65, 1, 1\) is not a positive multiple of the threadgroup \(32, 1, 1\)",
        ),
        ({"grid": (0, 1, 1)}, "not a positive multiple"),
        ({"grid": (2048, 1, 1), "threadgroup": (2048, 1, 1)}, "2048 threads in a threadgroup; at most 1024"),
        ({"template": {"T": "float"}}, "T='float' must be an int, bool, float or Dtype"),
        ({"template": {"T": mx.float32, "FACTOR": float("inf"), "N": 1}}, "FACTOR=inf must be finite"),
        ({"grid": [64, 1, 1]}, "must be tuples, numbers and dtypes"),
        ({"grid": (64, 1)}, r"the grid is \(64, 1\); give three integers"),
        ({"grid": (64.0, 1, 1)}, "give three integers"),
        ({"grid": (2**40, 1, 1), "threadgroup": (1, 1, 1)}, "a dimension of 2\\^31 threads or more"),
        ({"output_dtypes": ["float32"]}, "give MLX dtypes"),
        ({"output_shapes": [(-1,)]}, "hold a negative size"),
        ({"backend": "opencl"}, "unknown backend 'opencl'; choose one of metal, cuda, cpu"),
    ],
    ids=[
        "inputs",
        "outputs",
        "grid",
        "empty grid",
        "threads",
        "template",
        "infinite constant",
        "list",
        "two dimensions",
        "fraction",
        "past 32 bits",
        "name of a dtype",
        "negative size",
        "backend",
    ],
)
def test_a_bad_launch_is_refused_with_the_value_and_the_remedy(changes, message):
    with pytest.raises((SourceError, BackendError), match=message):
        call(**changes)


def test_too_much_threadgroup_memory_is_refused():
    kernel = Kernel.from_source(
        "big", ["x"], ["out"], "threadgroup T tile[N][64]; out[thread_position_in_grid.x] = x[0];"
    )
    with pytest.raises(SourceError, match=r"32784 bytes of threadgroup memory .* allows 32768"):
        call(
            Kernel.from_source("big", ["x"], ["out"], "threadgroup T a[N]; out[thread_position_in_grid.x] = x[0];"),
            template={"T": mx.float32, "N": 8193},
        )
    with pytest.raises(SourceError, match="33024 bytes"):
        call(kernel, template={"T": mx.float32, "N": 129})


def test_a_missing_file_is_named():
    with pytest.raises(SourceError, match=r"cannot read .*nowhere.metal"):
        call(Kernel("lost", ["x"], ["out"], body="nowhere.metal"))


def test_the_environment_chooses_the_backend(monkeypatch):
    monkeypatch.setattr(metal.backend, "_override", None)
    monkeypatch.setenv("LILY_MLX_BACKEND", "cpu")
    assert metal.current_backend() == "cpu"
    monkeypatch.setenv("LILY_MLX_BACKEND", "vulkan")
    with pytest.raises(BackendError, match="LILY_MLX_BACKEND=vulkan: unknown backend"):
        metal.current_backend()


@pytest.mark.parametrize(("name", "device"), [("metal", "Metal"), ("cuda", "CUDA")])
def test_a_backend_without_its_device_is_refused(name, device, monkeypatch):
    monkeypatch.setattr(getattr(mx, name), "is_available", lambda: False)
    with pytest.raises(BackendError, match=f"MLX has no {device} device here"), metal.use_backend(name):
        pass


def test_float_template_values_become_metal_constants():
    constants = float_constants({"EPS": 1e-6, "N": 3, "SCALE": 2.0, "BIG": 1e30})
    assert constants == (
        "constant constexpr float EPS = 1e-06f;\n"
        "constant constexpr float SCALE = 2.0f;\n"
        "constant constexpr float BIG = 1e+30f;\n"
    )


def test_metal_gets_one_name_for_each_text_and_constant():
    """MLX keys compiled kernels by name, so a name must stand for one source."""
    sources = {}

    def record(entry):
        if entry["type"] == "primitive":
            name, source = entry["arguments"][:2]
            assert sources.setdefault(name, source) == source

    other = Kernel.from_source(
        "scale", ["x"], ["out"], "uint i = thread_position_in_grid.x; out[i] = T(float(x[i]) + FACTOR * N);"
    )
    for kernel in (SCALE, other):
        for factor in (0.5, 0.25):

            def traced(x, kernel=kernel, factor=factor):
                with metal.use_backend("metal", tracing=True):
                    return call(kernel, inputs=[x], template={"T": mx.float32, "N": 2, "FACTOR": factor})

            mx.export_function(record, traced, mx.ones((64,)))
    assert len(sources) == 4
