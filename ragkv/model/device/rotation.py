"""Rotary embedding on a device: three launches in any dtype."""

import torch


def rotate_halves(raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """raw cos + rotate_half(raw) sin, (1, heads, R, D), for cos and sin (1, R, rotary dims) in
    float32.

    Computed in float32, and rounded once to the dtype of `raw`. Later dimensions stay as they are.
    """
    rotary_dims = cos.shape[-1]
    half = rotary_dims // 2
    turned = torch.empty_like(raw)
    part = raw[..., :rotary_dims]
    by_cos = part * cos  # float32
    first, second = part[..., :half], part[..., half:]
    torch.addcmul(by_cos[..., :half], second, sin[..., :half], value=-1, out=turned[..., :half])
    torch.addcmul(by_cos[..., half:], first, sin[..., half:], out=turned[..., half:rotary_dims])
    if rotary_dims < raw.shape[-1]:
        turned[..., rotary_dims:] = raw[..., rotary_dims:]
    return turned
