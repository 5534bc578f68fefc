// Products of four and eight rows on ARM, in the order of instructions in which a Neoverse-N1 takes least time.
//
// A compiler's order takes a tenth longer. What matters: an operation that takes fewer cycles than the one before it in
// the same unit waits, so those of one kind stand together; sums begin while the ones before are still being merged; and
// no address is computed. Within that the order was found by trying: a search moved
// instructions as far as the registers allow, and kept what was quicker. The additions are those of `some_parts`.
#pragma once

#include <cstddef>

#include "quantized.h"

#if defined(__ARM_FEATURE_DOTPROD)
namespace quire {

#define QUIRE_VECTORS                                                                                            \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", \
      "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

// Totals in v0 to v7 are zero, sums in v8 to v15 what they begin at, which stays in v31; v30 picks the low half of bytes.
#define QUIRE_BEGIN_LOOP                                                                     \
  "movi v0.4s, #0\nmovi v1.4s, #0\nmovi v2.4s, #0\nmovi v3.4s, #0\n"                         \
  "movi v4.4s, #0\nmovi v5.4s, #0\nmovi v6.4s, #0\nmovi v7.4s, #0\n"                         \
  "ldr q31, [x25]\nmovi v30.16b, #15\n"                                                      \
  "mov v8.16b, v31.16b\nmov v9.16b, v31.16b\nmov v10.16b, v31.16b\nmov v11.16b, v31.16b\n"   \
  "mov v12.16b, v31.16b\nmov v13.16b, v31.16b\nmov v14.16b, v31.16b\nmov v15.16b, v31.16b\n" \
  ".p2align 5\n1:\n"

// Eight rows by four outputs of Q4_1 as it is packed.
struct EightByFour {
  const int8_t* rows[8];
  const float* factors[8];  // [units][2] of each row: a unit's scale, and that times the sum of its integers
  const uint8_t *quants, *scales, *ahead;  // ahead: 320 bytes for each unit that are needed soon
  int64_t ahead_stride, units;
  const int32_t* first_sums;  // four times what sums begin at
  float* totals;  // [8][16], of which four of each row are written

  void run() const {
    asm volatile(
      "ldp x4, x5, [%0]\nldp x6, x7, [%0, #16]\nldp x8, x9, [%0, #32]\nldp x10, x11, [%0, #48]\n"
      "ldp x12, x13, [%0, #64]\nldp x14, x15, [%0, #80]\nldp x16, x17, [%0, #96]\nldp x21, x22, [%0, #112]\n"
      "ldp x23, x24, [%0, #128]\nldp x26, x27, [%0, #144]\nldp x20, x25, [%0, #160]\n"
      QUIRE_BEGIN_LOOP
      "ldr q27, [x23, #192]\nldr q21, [x9], #16\nldr q24, [x23, #0]\nldr q18, [x6], #16\nldr q19, [x7], #16\n"
      "ldr q25, [x23, #64]\nldr q16, [x4], #16\nand v28.16b, v24.16b, v30.16b\n"
      "sdot v10.4s, v28.16b, v18.4b[0]\nldr q26, [x23, #128]\nldr q22, [x10], #16\nldr q23, [x11], #16\n"
      "and v29.16b, v25.16b, v30.16b\nldr q17, [x5], #16\nsdot v8.4s, v28.16b, v16.4b[0]\nldr q20, [x8], #16\n"
      "sdot v9.4s, v28.16b, v17.4b[0]\nsdot v12.4s, v28.16b, v20.4b[0]\nushr v24.16b, v24.16b, #4\n"
      "sdot v15.4s, v28.16b, v23.4b[0]\nsdot v10.4s, v29.16b, v18.4b[1]\nprfm pldl2keep, [x26, #0]\n"
      "sdot v13.4s, v28.16b, v21.4b[0]\nsdot v13.4s, v29.16b, v21.4b[1]\nsdot v11.4s, v28.16b, v19.4b[0]\n"
      "sdot v14.4s, v28.16b, v22.4b[0]\nand v28.16b, v26.16b, v30.16b\nsdot v9.4s, v29.16b, v17.4b[1]\n"
      "sdot v15.4s, v29.16b, v23.4b[1]\nsdot v14.4s, v29.16b, v22.4b[1]\nsdot v12.4s, v29.16b, v20.4b[1]\n"
      "sdot v14.4s, v28.16b, v22.4b[2]\nsdot v8.4s, v29.16b, v16.4b[1]\nsdot v15.4s, v28.16b, v23.4b[2]\n"
      "sdot v11.4s, v29.16b, v19.4b[1]\nand v29.16b, v27.16b, v30.16b\nsdot v8.4s, v28.16b, v16.4b[2]\n"
      "sdot v10.4s, v28.16b, v18.4b[2]\nsdot v11.4s, v28.16b, v19.4b[2]\nsdot v14.4s, v29.16b, v22.4b[3]\n"
      "sdot v12.4s, v28.16b, v20.4b[2]\nsdot v13.4s, v28.16b, v21.4b[2]\nsdot v11.4s, v29.16b, v19.4b[3]\n"
      "sdot v12.4s, v29.16b, v20.4b[3]\nsdot v9.4s, v28.16b, v17.4b[2]\nsdot v15.4s, v29.16b, v23.4b[3]\n"
      "sdot v9.4s, v29.16b, v17.4b[3]\nprfm pldl2keep, [x26, #64]\nldr d28, [x21], #8\n"
      "sdot v13.4s, v29.16b, v21.4b[3]\nldr q17, [x5], #16\nsdot v8.4s, v29.16b, v16.4b[3]\n"
      "sdot v10.4s, v29.16b, v18.4b[3]\nldr q16, [x4], #16\nldr q18, [x6], #16\nushr v26.16b, v26.16b, #4\n"
      "ldr q20, [x8], #16\nsdot v8.4s, v24.16b, v16.4b[0]\nldr q19, [x7], #16\nldr q23, [x11], #16\n"
      "ldr q21, [x9], #16\nushr v25.16b, v25.16b, #4\nldr q22, [x10], #16\nsdot v13.4s, v24.16b, v21.4b[0]\n"
      "sdot v11.4s, v24.16b, v19.4b[0]\nsdot v9.4s, v24.16b, v17.4b[0]\nushr v27.16b, v27.16b, #4\n"
      "sdot v10.4s, v24.16b, v18.4b[0]\nsdot v14.4s, v24.16b, v22.4b[0]\nsdot v10.4s, v25.16b, v18.4b[1]\n"
      "sdot v12.4s, v24.16b, v20.4b[0]\nsdot v14.4s, v25.16b, v22.4b[1]\nsdot v15.4s, v24.16b, v23.4b[0]\n"
      "prfm pldl2keep, [x26, #128]\nsdot v9.4s, v25.16b, v17.4b[1]\nsdot v8.4s, v25.16b, v16.4b[1]\n"
      "sdot v11.4s, v25.16b, v19.4b[1]\nsdot v11.4s, v26.16b, v19.4b[2]\nsdot v10.4s, v26.16b, v18.4b[2]\n"
      "sdot v13.4s, v25.16b, v21.4b[1]\nsdot v15.4s, v25.16b, v23.4b[1]\nsdot v13.4s, v26.16b, v21.4b[2]\n"
      "sdot v15.4s, v26.16b, v23.4b[2]\nsdot v12.4s, v25.16b, v20.4b[1]\nsdot v12.4s, v26.16b, v20.4b[2]\n"
      "sdot v13.4s, v27.16b, v21.4b[3]\nsdot v15.4s, v27.16b, v23.4b[3]\nldr d21, [x24, #32]\n"
      "sdot v9.4s, v26.16b, v17.4b[2]\nsdot v8.4s, v26.16b, v16.4b[2]\nsdot v12.4s, v27.16b, v20.4b[3]\n"
      "sdot v14.4s, v26.16b, v22.4b[2]\nldr d29, [x22], #8\nadd x23, x23, #256\n"
      "sdot v8.4s, v27.16b, v16.4b[3]\nsdot v11.4s, v27.16b, v19.4b[3]\nfsub v8.4s, v8.4s, v31.4s\n"
      "ldr d20, [x24, #0]\nldr d19, [x15], #8\nprfm pldl2keep, [x26, #192]\nsdot v9.4s, v27.16b, v17.4b[3]\n"
      "sdot v14.4s, v27.16b, v22.4b[3]\nsdot v10.4s, v27.16b, v18.4b[3]\nldr d22, [x16], #8\n"
      "ldr d23, [x17], #8\nfcvtl v20.4s, v20.4h\nfsub v10.4s, v10.4s, v31.4s\nfsub v11.4s, v11.4s, v31.4s\n"
      "fsub v14.4s, v14.4s, v31.4s\nfsub v9.4s, v9.4s, v31.4s\nldr d17, [x13], #8\n"
      "fsub v15.4s, v15.4s, v31.4s\nldr d18, [x14], #8\nldr d16, [x12], #8\nfmul v25.4s, v20.4s, v17.s[0]\n"
      "fmul v24.4s, v20.4s, v16.s[0]\nfmla v0.4s, v24.4s, v8.4s\nfsub v12.4s, v12.4s, v31.4s\n"
      "fmul v24.4s, v20.4s, v22.s[0]\nfmul v27.4s, v20.4s, v19.s[0]\nfcvtl v21.4s, v21.4h\n"
      "fmla v3.4s, v27.4s, v11.4s\nfsub v13.4s, v13.4s, v31.4s\nfmla v1.4s, v25.4s, v9.4s\n"
      "fmul v26.4s, v20.4s, v18.s[0]\nprfm pldl2keep, [x26, #256]\nfmla v2.4s, v26.4s, v10.4s\n"
      "fmul v25.4s, v20.4s, v23.s[0]\nfmul v27.4s, v20.4s, v29.s[0]\nfmla v4.4s, v24.4s, v12.4s\n"
      "ldr q11, [x25, #0]\nldr q8, [x25, #0]\nfmla v5.4s, v25.4s, v13.4s\nfmul v26.4s, v20.4s, v28.s[0]\n"
      "fmla v6.4s, v26.4s, v14.4s\nldr q14, [x25, #0]\nldr q12, [x25, #0]\nfmla v4.4s, v21.4s, v22.s[1]\n"
      "ldr q13, [x25, #0]\nfmla v7.4s, v27.4s, v15.4s\nldr q9, [x25, #0]\nfmla v1.4s, v21.4s, v17.s[1]\n"
      "fmla v2.4s, v21.4s, v18.s[1]\nfmla v0.4s, v21.4s, v16.s[1]\nldr q15, [x25, #0]\n"
      "fmla v7.4s, v21.4s, v29.s[1]\nfmla v3.4s, v21.4s, v19.s[1]\nfmla v5.4s, v21.4s, v23.s[1]\n"
      "ldr q10, [x25, #0]\nadd x24, x24, #64\nfmla v6.4s, v21.4s, v28.s[1]\nadd x26, x26, x27\n"
      "subs x20, x20, #1\nb.ne 1b\n"
      "ldr x20, [%0, #176]\nstr q0, [x20]\nstr q1, [x20, #64]\nstr q2, [x20, #128]\nstr q3, [x20, #192]\n"
      "str q4, [x20, #256]\nstr q5, [x20, #320]\nstr q6, [x20, #384]\nstr q7, [x20, #448]\n"
      :
      : "r"(this)
      : "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x20", "x21", "x22",
        "x23", "x24", "x25", "x26", "x27", QUIRE_VECTORS, "cc", "memory");
  }
};
static_assert(offsetof(EightByFour, factors) == 64 && offsetof(EightByFour, quants) == 128 &&
              offsetof(EightByFour, ahead_stride) == 152 && offsetof(EightByFour, totals) == 176);

// Four rows by eight outputs of a panel that was taken apart, with minima.
struct FourByEight {
  const int8_t* rows[4];
  const float* factors[4];
  const uint8_t* quants;
  const float *scales, *minima;
  const int32_t* first_sums;
  int64_t units;
  float* totals;  // [4][16], of which eight of each row are written

  void run() const {
    asm volatile(
      "ldp x4, x5, [%0]\nldp x6, x7, [%0, #16]\nldp x12, x13, [%0, #32]\nldp x14, x15, [%0, #48]\n"
      "ldp x23, x24, [%0, #64]\nldp x26, x25, [%0, #80]\nldr x20, [%0, #96]\n"
      QUIRE_BEGIN_LOOP
      "ldr q16, [x4], #16\nldr q17, [x5], #16\nldr q21, [x23, #16]\nldr q20, [x23, #0]\nldr q18, [x6], #16\n"
      "sdot v11.4s, v21.16b, v17.4b[0]\nldr q23, [x23, #80]\nsdot v9.4s, v21.16b, v16.4b[0]\n"
      "sdot v12.4s, v20.16b, v18.4b[0]\nldr q19, [x7], #16\nsdot v15.4s, v21.16b, v19.4b[0]\n"
      "ldr q22, [x23, #64]\nsdot v13.4s, v21.16b, v18.4b[0]\nsdot v13.4s, v23.16b, v18.4b[1]\n"
      "sdot v10.4s, v20.16b, v17.4b[0]\nsdot v14.4s, v20.16b, v19.4b[0]\nldr q21, [x23, #144]\n"
      "sdot v8.4s, v20.16b, v16.4b[0]\nldr q20, [x23, #128]\nsdot v11.4s, v23.16b, v17.4b[1]\n"
      "sdot v10.4s, v22.16b, v17.4b[1]\nldr q25, [x24, #16]\nsdot v10.4s, v20.16b, v17.4b[2]\n"
      "sdot v15.4s, v23.16b, v19.4b[1]\nsdot v12.4s, v22.16b, v18.4b[1]\nsdot v12.4s, v20.16b, v18.4b[2]\n"
      "sdot v8.4s, v22.16b, v16.4b[1]\nsdot v13.4s, v21.16b, v18.4b[2]\nsdot v9.4s, v23.16b, v16.4b[1]\n"
      "sdot v9.4s, v21.16b, v16.4b[2]\nsdot v14.4s, v22.16b, v19.4b[1]\nldr q23, [x23, #208]\n"
      "sdot v8.4s, v20.16b, v16.4b[2]\nldr q22, [x23, #192]\nsdot v12.4s, v22.16b, v18.4b[3]\n"
      "sdot v14.4s, v20.16b, v19.4b[2]\nsdot v13.4s, v23.16b, v18.4b[3]\nldr q20, [x23, #256]\n"
      "sdot v11.4s, v21.16b, v17.4b[2]\nsdot v14.4s, v22.16b, v19.4b[3]\nsdot v8.4s, v22.16b, v16.4b[3]\n"
      "sdot v15.4s, v21.16b, v19.4b[2]\nsdot v10.4s, v22.16b, v17.4b[3]\nsdot v9.4s, v23.16b, v16.4b[3]\n"
      "ldr q22, [x23, #320]\nsdot v15.4s, v23.16b, v19.4b[3]\nldr q19, [x7], #16\nldr q18, [x6], #16\n"
      "sdot v11.4s, v23.16b, v17.4b[3]\nldr q21, [x23, #272]\nsdot v12.4s, v20.16b, v18.4b[0]\n"
      "ldr q23, [x23, #336]\nsdot v14.4s, v20.16b, v19.4b[0]\nldr q16, [x4], #16\nldr q24, [x24, #0]\n"
      "ldr q17, [x5], #16\nsdot v9.4s, v21.16b, v16.4b[0]\nldr d29, [x13], #8\n"
      "sdot v13.4s, v21.16b, v18.4b[0]\nsdot v10.4s, v20.16b, v17.4b[0]\nsdot v14.4s, v22.16b, v19.4b[1]\n"
      "ldr d28, [x12], #8\nsdot v11.4s, v21.16b, v17.4b[0]\nsdot v15.4s, v21.16b, v19.4b[0]\n"
      "sdot v10.4s, v22.16b, v17.4b[1]\nsdot v9.4s, v23.16b, v16.4b[1]\nsdot v13.4s, v23.16b, v18.4b[1]\n"
      "sdot v15.4s, v23.16b, v19.4b[1]\nsdot v8.4s, v20.16b, v16.4b[0]\nldr q20, [x23, #384]\n"
      "ldr q21, [x23, #400]\nsdot v13.4s, v21.16b, v18.4b[2]\nldr q26, [x26, #0]\n"
      "sdot v8.4s, v22.16b, v16.4b[1]\nsdot v12.4s, v22.16b, v18.4b[1]\nsdot v11.4s, v23.16b, v17.4b[1]\n"
      "ldr q22, [x23, #448]\nsdot v10.4s, v20.16b, v17.4b[2]\nsdot v9.4s, v21.16b, v16.4b[2]\n"
      "ldr q23, [x23, #464]\nsdot v9.4s, v23.16b, v16.4b[3]\nsdot v11.4s, v21.16b, v17.4b[2]\n"
      "fsub v9.4s, v9.4s, v31.4s\nsdot v14.4s, v20.16b, v19.4b[2]\nsdot v8.4s, v20.16b, v16.4b[2]\n"
      "sdot v11.4s, v23.16b, v17.4b[3]\nsdot v14.4s, v22.16b, v19.4b[3]\nsdot v15.4s, v21.16b, v19.4b[2]\n"
      "sdot v12.4s, v20.16b, v18.4b[2]\nsdot v10.4s, v22.16b, v17.4b[3]\nfsub v10.4s, v10.4s, v31.4s\n"
      "sdot v15.4s, v23.16b, v19.4b[3]\nsdot v8.4s, v22.16b, v16.4b[3]\nadd x23, x23, #512\n"
      "fsub v11.4s, v11.4s, v31.4s\nsdot v12.4s, v22.16b, v18.4b[3]\nsdot v13.4s, v23.16b, v18.4b[3]\n"
      "fsub v14.4s, v14.4s, v31.4s\nfmul v20.4s, v24.4s, v28.s[0]\nldr d16, [x14], #8\nldr q27, [x26, #16]\n"
      "fsub v8.4s, v8.4s, v31.4s\nldr d17, [x15], #8\nfmul v21.4s, v25.4s, v28.s[0]\n"
      "fmul v22.4s, v24.4s, v29.s[0]\nfmla v1.4s, v21.4s, v9.4s\nfsub v12.4s, v12.4s, v31.4s\n"
      "fmul v23.4s, v25.4s, v29.s[0]\nfmla v2.4s, v22.4s, v10.4s\nfsub v13.4s, v13.4s, v31.4s\n"
      "fmla v3.4s, v23.4s, v11.4s\nfmla v0.4s, v20.4s, v8.4s\nfmla v2.4s, v26.4s, v29.s[1]\n"
      "fmul v20.4s, v24.4s, v16.s[0]\nadd x24, x24, #64\nfmul v21.4s, v25.4s, v16.s[0]\n"
      "fsub v15.4s, v15.4s, v31.4s\nldr q10, [x25, #0]\nadd x26, x26, #64\nfmul v23.4s, v25.4s, v17.s[0]\n"
      "fmla v7.4s, v23.4s, v15.4s\nldr q9, [x25, #0]\nldr q15, [x25, #0]\nfmla v4.4s, v20.4s, v12.4s\n"
      "fmul v22.4s, v24.4s, v17.s[0]\nfmla v4.4s, v26.4s, v16.s[1]\nfmla v5.4s, v21.4s, v13.4s\n"
      "fmla v6.4s, v22.4s, v14.4s\nfmla v6.4s, v26.4s, v17.s[1]\nldr q14, [x25, #0]\n"
      "fmla v5.4s, v27.4s, v16.s[1]\nldr q8, [x25, #0]\nfmla v7.4s, v27.4s, v17.s[1]\n"
      "fmla v1.4s, v27.4s, v28.s[1]\nldr q12, [x25, #0]\nfmla v0.4s, v26.4s, v28.s[1]\nldr q13, [x25, #0]\n"
      "fmla v3.4s, v27.4s, v29.s[1]\nldr q11, [x25, #0]\n"
      "subs x20, x20, #1\nb.ne 1b\n"
      "ldr x20, [%0, #104]\nstp q0, q1, [x20]\nstp q2, q3, [x20, #64]\nstp q4, q5, [x20, #128]\n"
      "stp q6, q7, [x20, #192]\n"
      :
      : "r"(this)
      : "x4", "x5", "x6", "x7", "x12", "x13", "x14", "x15", "x20", "x23", "x24", "x25", "x26", QUIRE_VECTORS, "cc",
        "memory");
  }
};
static_assert(offsetof(FourByEight, factors) == 32 && offsetof(FourByEight, quants) == 64 &&
              offsetof(FourByEight, minima) == 80 && offsetof(FourByEight, units) == 96 &&
              offsetof(FourByEight, totals) == 104);

}  // namespace quire
#endif
