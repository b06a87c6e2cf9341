"""A kernel in CUDA C++ without nvcc: cuda.bindings compiles it with NVRTC, cuda.core launches it on torch's stream.

`pip install cuda-core cuda-bindings nvidia-cuda-nvrtc`. Beside it the plain code, which is what it is compared with.
"""

from functools import cache

import torch

SOURCE = """
// y = w x / sqrt(mean(x^2) + eps): a block for each row of x [rows, size]
extern "C" __global__ void rms_norm(const float* x, const float* w, float* y, int size, float eps) {
    __shared__ float sums[256];
    x += (long long)blockIdx.x * size, y += (long long)blockIdx.x * size;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < size; i += 256) sum += x[i] * x[i];
    sums[threadIdx.x] = sum;
    for (int half = 128; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    float scale = 1.0f / sqrtf(sums[0] / size + eps);
    for (int i = threadIdx.x; i < size; i += 256) y[i] = w[i] * (x[i] * scale);
}
"""


def plain_rms_norm(x, w, eps=1e-5):
    """x [rows, size], w [size] -> [rows, size]"""
    return w * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


@cache
def compiled(capability):
    """To machine code, `capability` 80 or 90 or 100; needs no GPU."""
    from cuda.bindings import nvrtc

    def checked(status, *found):
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {status.name}")
        return found[0] if found else None

    program = checked(*nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"rms_norm.cu", 0, [], []))
    checked(*nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{capability}".encode()]))
    code = bytearray(checked(*nvrtc.nvrtcGetCUBINSize(program)))
    checked(*nvrtc.nvrtcGetCUBIN(program, code))
    return bytes(code)


class TorchStream:
    def __cuda_stream__(self):
        return 0, torch.cuda.current_stream().cuda_stream


def rms_norm(x, w, eps=1e-5):
    """The same by the kernel, in float32."""
    import numpy as np
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    x, w, y = x.contiguous(), w.contiguous(), torch.empty_like(x)
    device = Device(x.device.index)
    device.set_current()
    major, minor = torch.cuda.get_device_capability(x.device)
    kernel = ObjectCode.from_cubin(compiled(10 * major + minor)).get_kernel("rms_norm")
    numbers = np.int32(x.shape[-1]), np.float32(eps)
    config = LaunchConfig(grid=len(x), block=256)
    launch(device.create_stream(TorchStream()), config, kernel, x.data_ptr(), w.data_ptr(), y.data_ptr(), *numbers)
    return y
