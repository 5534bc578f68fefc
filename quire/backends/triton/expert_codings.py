"""How weights of experts become bfloat16 numbers in the registers of the tensor cores: the parts of
`streamed_experts.py` that depend on the format.

MXFP4: two codes become two numbers by a shift, a mask and a multiplication. A code is a sign, two
bits of an exponent and one of a fraction. Put at the sign, the lowest bits of the exponent and the
highest one of the fraction of a bfloat16, they are the number times 2 ** -126 (0.5 is a subnormal
number, as it is among the codes); the factor restores that and the block's exponent. Nothing is
rounded.

Integers with scales: a code of 4 bits at bits 20 to 23 of a float32 is its value times 2 ** -129,
one of 8 bits at bits 16 to 23 times 2 ** -133 (subnormal numbers, and those with the first exponent
after them). One fused multiplication and addition makes code * scale - zero point * scale, or minus
a minimum, of it: code * scale has so few bits that it is exact, so this is the float32 number that
the expanded weight has, too. It is rounded to bfloat16 as there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.backends.triton import expert_layouts

_MXFP4_ASM = """{
.reg .b32 first, second, third, fourth, moved, factor, none;
mov.b32 none, 0x80008000;
prmt.b32 factor, $9, 0, $10;
mul.lo.u32 factor, factor, 0x00800080;
and.b32 first, $8, 0x81C081C0;
shl.b32 second, $8, 3;
and.b32 second, second, 0x81C081C0;
shl.b32 third, $8, 6;
and.b32 third, third, 0x81C081C0;
shl.b32 fourth, $8, 1;
and.b32 fourth, fourth, 0x80008000;
shr.b32 moved, $8, 4;
lop3.b32 fourth, moved, 0x00C000C0, fourth, 0xEA;
shr.b32 moved, $8, 5;
lop3.b32 fourth, moved, 0x01000100, fourth, 0xEA;
fma.rn.bf16x2 first, first, factor, none;
fma.rn.bf16x2 second, second, factor, none;
fma.rn.bf16x2 third, third, factor, none;
fma.rn.bf16x2 fourth, fourth, factor, none;
mov.b32 {$0, $1}, first;
mov.b32 {$2, $3}, second;
mov.b32 {$4, $5}, third;
mov.b32 {$6, $7}, fourth;
}"""
"""Inputs: $8 a word of eight codes (`expert_layouts.py`), $9 four exponents, $10 which one is theirs,
as `prmt` wants it. Outputs: the numbers. (lop3 with 0xEA: first and second, or third.)
"""

_ROUNDED_ASM = """
fma.rn.f32 a, a, {first_scale}, {first_other};
fma.rn.f32 b, b, {first_scale}, {first_other};
fma.rn.f32 c, c, {first_scale}, {first_other};
fma.rn.f32 d, d, {first_scale}, {first_other};
fma.rn.f32 e, e, {second_scale}, {second_other};
fma.rn.f32 f, f, {second_scale}, {second_other};
fma.rn.f32 g, g, {second_scale}, {second_other};
fma.rn.f32 h, h, {second_scale}, {second_other};
cvt.rn.bf16x2.f32 p, b, a;
mov.b32 {{$0, $1}}, p;
cvt.rn.bf16x2.f32 p, d, c;
mov.b32 {{$2, $3}}, p;
cvt.rn.bf16x2.f32 p, f, e;
mov.b32 {{$4, $5}}, p;
cvt.rn.bf16x2.f32 p, h, g;
mov.b32 {{$6, $7}}, p;
}}"""
_NAMES = "first_scale", "first_other", "second_scale", "second_other"
_NIBBLES_ASM = """{
.reg .b32 a, b, c, d, e, f, g, h, p, low, high;
and.b32 high, $8, 0xF0F0F0F0;
shl.b32 low, $8, 4;
and.b32 low, low, 0xF0F0F0F0;
prmt.b32 a, low, 0, 0x4044;
prmt.b32 b, high, 0, 0x4044;
prmt.b32 c, low, 0, 0x4144;
prmt.b32 d, high, 0, 0x4144;
prmt.b32 e, low, 0, 0x4244;
prmt.b32 f, high, 0, 0x4244;
prmt.b32 g, low, 0, 0x4344;
prmt.b32 h, high, 0, 0x4344;""" + _ROUNDED_ASM.format(
    **{name: f"${9 + i}" for i, name in enumerate(_NAMES)}
)
"""Inputs: $8 eight codes; then scale and what is added, of the first four codes and of the others."""
_BYTES_ASM = """{
.reg .b32 a, b, c, d, e, f, g, h, p;
prmt.b32 a, $8, 0, 0x4044;
prmt.b32 b, $8, 0, 0x4144;
prmt.b32 c, $8, 0, 0x4244;
prmt.b32 d, $8, 0, 0x4344;
prmt.b32 e, $9, 0, 0x4044;
prmt.b32 f, $9, 0, 0x4144;
prmt.b32 g, $9, 0, 0x4244;
prmt.b32 h, $9, 0, 0x4344;""" + _ROUNDED_ASM.format(
    **{name: f"${10 + i}" for i, name in enumerate(_NAMES)}
)
"""Inputs: $8 and $9 four codes each; the rest as before."""

MXFP4 = gl.constexpr(expert_layouts.MXFP4)
ZEROS = gl.constexpr(expert_layouts.ZEROS)
MINIMA = gl.constexpr(expert_layouts.MINIMA)
BYTES = gl.constexpr(expert_layouts.BYTES)
_EXPAND_MXFP4 = gl.constexpr(_MXFP4_ASM)
_EXPAND_NIBBLES = gl.constexpr(_NIBBLES_ASM)
_EXPAND_BYTES = gl.constexpr(_BYTES_ASM)
_INPUTS = gl.constexpr(expert_layouts.PIECE_INPUTS)


@gluon.constexpr_function
def scale_words(coding, group):
    """How many words of scales a thread has for a piece: for its two rows, one after the other, those
    of each group of inputs.
    """
    if coding == MXFP4:
        return 1
    return 2 * max(_INPUTS // group, 1) * (2 if coding == MINIMA else 1)


@gluon.jit
def expand(piece, CODING: gl.constexpr, OPERAND: gl.constexpr, WARPS: gl.constexpr):
    """A piece's numbers [16 * WARPS, 64] from its words of codes [32 * WARPS, 4] (two such tensors
    for eight bits) and the words of scales that each thread has.
    """
    # Not pure, so that the compiler leaves it where it is, beside the product of the piece before.
    if CODING == MXFP4:
        selected = gl.arange(0, 4, gl.SliceLayout(0, piece[0].type.layout))[None, :] + 0x4440
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _EXPAND_MXFP4,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [piece[0], piece[1][:, None], selected],
            dtype=(gl.bfloat16,) * 8,
            is_pure=False,
            pack=1,
        )
    else:
        layout: gl.constexpr = piece[0].type.layout
        scales = _scales(piece[-1], CODING, layout)
        if CODING == BYTES:
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                _EXPAND_BYTES,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f,f,f,f",
                [piece[0], piece[1], scales[0], scales[1], scales[2], scales[3]],
                dtype=(gl.bfloat16,) * 8,
                is_pure=False,
                pack=1,
            )
        else:
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                _EXPAND_NIBBLES,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f,f",
                [piece[0], scales[0], scales[1], scales[2], scales[3]],
                dtype=(gl.bfloat16,) * 8,
                is_pure=False,
                pack=1,
            )
    low = gl.join(gl.join(a, b), gl.join(c, d))
    high = gl.join(gl.join(e, f), gl.join(g, h))
    # Of threads and words: warp, row, t; row + 8, 32 inputs; of the joins: neighbours, 8 inputs, 16
    # inputs.
    numbers = gl.join(low, high).reshape(WARPS, 8, 4, 2, 2, 2, 2, 2).permute(0, 3, 1, 4, 7, 6, 2, 5)
    return gl.convert_layout(numbers.reshape(16 * WARPS, _INPUTS), OPERAND, assert_trivial=True)


@gluon.jit
def _scales(words, CODING: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale, and what is added, of the first and of the second 16 of the inputs of each word of codes
    [threads, 4], from the words [threads, W] of rows, groups and (MINIMA) these two.
    """
    if CODING == MINIMA:
        scale, other = gl.split(words.reshape(words.shape[0], words.shape[1] // 2, 2))
        scale = scale.to(gl.float32, bitcast=True)
        other = other.to(gl.float32, bitcast=True)
    elif CODING == ZEROS:
        scale = (words & -256).to(gl.float32, bitcast=True)
        # minus the zero point, put where the codes are
        zero = ((words & 255) << 20 | -2147483648).to(gl.float32, bitcast=True)
        other = zero * scale
    else:
        scale = words.to(gl.float32, bitcast=True)
        other = scale * -1.1754943508222875e-38  # -128 * 2 ** -133
    if scale.shape[1] == 8:
        first, second = gl.split(scale.reshape(scale.shape[0], 4, 2))
        first_other, second_other = gl.split(other.reshape(other.shape[0], 4, 2))
    else:
        if scale.shape[1] == 2:
            first = gl.join(scale, scale).reshape(scale.shape[0], 4)
            first_other = gl.join(other, other).reshape(other.shape[0], 4)
        else:
            first, first_other = scale, other
        second, second_other = first, first_other
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(first_other, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(second_other, LAYOUT, assert_trivial=True),
    )
