"""A kernel in TileLang (`pip install tilelang`): tiles, copies and reductions; layouts and threads are its compiler's.

Beside it the plain code, which is what it is compared with.
"""

from functools import cache


def plain_rms_norm(x, w, eps=1e-5):
    """x [rows, size], w [size] -> [rows, size]"""
    return w * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def program(rows, size, eps, tile=4):
    """y = w x / sqrt(mean(x^2) + eps): a block for each `tile` rows of x [rows, size]."""
    import tilelang.language as T

    @T.prim_func
    def rms_norm(
        x: T.Tensor((rows, size), "float32"), w: T.Tensor((size,), "float32"), y: T.Tensor((rows, size), "float32")
    ):
        with T.Kernel(T.ceildiv(rows, tile), threads=128) as at:
            held, squares = T.alloc_fragment((tile, size), "float32"), T.alloc_fragment((tile, size), "float32")
            sums = T.alloc_fragment((tile,), "float32")
            T.copy(x[at * tile, 0], held)
            for i, j in T.Parallel(tile, size):
                squares[i, j] = held[i, j] * held[i, j]
            T.reduce_sum(squares, sums, dim=1)
            for i, j in T.Parallel(tile, size):
                held[i, j] = w[j] * (held[i, j] * T.rsqrt(sums[i] / size + eps))
            T.copy(held, y[at * tile, 0])

    return rms_norm


def source(capability, rows=7, size=64, eps=1e-5):
    """The CUDA C++ that TileLang writes for `capability`, 80 or 90 or 100; needs neither GPU nor nvcc."""
    from tilelang import tvm
    from tilelang.engine import lower

    with tvm.target.Target({"kind": "cuda", "arch": f"sm_{capability}"}) as target:
        return lower(program(rows, size, eps), target=target, enable_device_compile=False).kernel_source


@cache
def compiled(rows, size, eps):
    import tilelang

    return tilelang.compile(program(rows, size, eps), out_idx=[2], target="cuda")


def rms_norm(x, w, eps=1e-5):
    """The same by the kernel, in float32; compiled once for each shape, which needs nvcc."""
    return compiled(*x.shape, eps)(x.contiguous(), w.contiguous())
