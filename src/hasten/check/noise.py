"""Measure the script's own rounding with small random errors on each operator's result (Monte Carlo arithmetic).

How far a gradient moves when every product and sum is off by one part in 2^24 (2^9 for bf16) is a property of the
training, not of a technique: a technique that only rounds differently moves it about as far. After D. S. Parker, Monte
Carlo Arithmetic (1997), at the level of torch's operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that sum: other kernels, other orders of summation and narrower dtypes round differently here.
_NOISY = frozenset(
    """
    mm addmm bmm baddbmm mv addmv dot linear linear_backward matmul einsum
    convolution convolution_backward convolution_overrideable mkldnn_convolution _convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable
    mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward lstm gru
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _fused_rms_norm _fused_rms_norm_backward
    sum mean var var_mean norm linalg_vector_norm cumsum logsumexp
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward embedding_dense_backward index_add scatter_add
    avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward
    """.split()
)


# Operators whose arguments autocast would cast to 16 bits.
_CASTING = frozenset(
    """
    mm addmm bmm baddbmm mv addmv dot convolution convolution_backward convolution_overrideable
    mkldnn_convolution _convolution mkldnn_rnn_layer mkldnn_rnn_layer_backward
    """.split()
)


_silent = 0  # nesting depth of `without_noise`


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Compute without errors inside this context: for inspections that are not part of the training."""
    global _silent
    _silent += 1
    try:
        yield
    finally:
        _silent -= 1


class Noise(TorchDispatchMode):
    """Multiplies each element of summing operators' results by `1 + size * u`, with u uniform in [-1, 1].

    Args:
        size: Size of the relative errors.
        seed: Seed of a separate generator, so that the training's random numbers stay the same.
    """

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = size
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _silent:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _CASTING:  # like a cast, an error of a weight is the same for all samples of a batch
            args = tuple(self._disturbed(arg) for arg in args)
        output = func(*args, **(kwargs or {}))
        if name not in _NOISY or "out" in func._overloadname:
            return output
        if isinstance(output, torch.Tensor):
            return self._disturbed(output)
        return type(output)(self._disturbed(part) for part in output) if isinstance(output, list | tuple) else output

    def _disturbed(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        errors = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        errors.uniform_(-self._size, self._size, generator=generator)
        return torch.addcmul(tensor, tensor, errors)
