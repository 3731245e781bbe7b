"""Which operations may run on the local piece, because element i of the result depends on elements i of the operands only."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


# out-of-place, in-place (`name_`) and out= variants alike
_UNARY = _words("""
abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor
frac isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive
rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc fix absolute special_i0e
relu relu6 elu selu celu gelu silu mish softplus hardsigmoid hardswish hardtanh leaky_relu threshold
""")
_BINARY = _words("""
add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power atan2 copysign hypot
nextafter maximum minimum fmax fmin logaddexp logaddexp2 bitwise_and bitwise_or bitwise_xor logical_and logical_or
logical_xor eq ne lt le gt ge greater less heaviside xlogy ldexp
__and__ __or__ __xor__ __iand__ __ior__ __ixor__ isclose
""")
_MORE = _words("""
addcmul addcdiv lerp where clamp clamp_min clamp_max clip copy zero
sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward elu_backward leaky_relu_backward
hardtanh_backward softplus_backward
""")
_FOREACH = _words("""
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor frac lerp
lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc
zero
""")

_BASES = _UNARY + _BINARY + _MORE + [f"_foreach_{name}" for name in _FOREACH]
ELEMENT_WISE = frozenset(_BASES) | frozenset(f"{name}_" for name in _BASES)

# Same element count and order: applied to the local piece, with the piece's own shape in place of the tensor's.
LIKE = frozenset(_words("zeros_like ones_like empty_like full_like clone _to_copy contiguous"))

FUSED_OPTIMISERS = frozenset(_words("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"))

RANDOM_IN_PLACE = frozenset(_words("normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli_"))
RANDOM_LIKE = frozenset(_words("rand_like randn_like randint_like"))
