/* cublasLt as far as quire/backends/triton/cublas.py calls it, on bfloat16 matrices in the CPU's memory. It returns an
   error where the real one might read wrong memory or be allowed to split sums. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, WRONG = 7, BFLOAT16 = 14 };

typedef struct { int compute, scale, transposed, epilogue; const uint16_t *bias; } Operation;
typedef struct { int type, count; uint64_t rows, columns; int64_t stride, apart; } Layout;
typedef struct { uint32_t split_sums, alignments[4]; } Preference;
typedef struct { uint64_t algorithm[8]; size_t memory; int status; float waves; int reserved[4]; } Result;

static float number(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int cublasLtCreate(void **made) { *made = malloc(1); return OK; }

int cublasLtMatmulDescCreate(Operation **made, int compute, int scale) {
    *made = calloc(1, sizeof(Operation));
    (*made)->compute = compute;
    (*made)->scale = scale;
    return compute == 68 && scale == 0 ? OK : WRONG;
}

int cublasLtMatmulDescSetAttribute(Operation *operation, int attribute, const void *value, size_t size) {
    if (attribute == 3 && size == 4) operation->transposed = *(const int *)value;
    else if (attribute == 7 && size == 4) operation->epilogue = *(const int *)value;
    else if (attribute == 8 && size == 8) operation->bias = *(const uint16_t *const *)value;
    else return WRONG;
    return OK;
}

int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *made = malloc(sizeof(Layout));
    **made = (Layout){type, 1, rows, columns, stride, 0};
    return OK;
}

int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    if (attribute == 5 && size == 4) layout->count = *(const int *)value;
    else if (attribute == 6 && size == 8) layout->apart = *(const int64_t *)value;
    else return WRONG;
    return OK;
}

int cublasLtMatmulPreferenceCreate(Preference **made) {
    *made = malloc(sizeof(Preference));
    **made = (Preference){7, {256, 256, 256, 256}};
    return OK;
}

int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t size) {
    uint32_t given = *(const uint32_t *)value;
    if (size != 4) return WRONG;
    if (attribute == 3) preference->split_sums = given;
    else if (attribute >= 5 && attribute <= 8) preference->alignments[attribute - 5] = given;
    else return WRONG;
    return OK;
}

static int fit(const Operation *operation, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    const Layout *all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (all[i]->type != BFLOAT16 || all[i]->count != a->count) return 0;
        if (a->count == 1 ? all[i]->stride != (int64_t)all[i]->rows : all[i]->stride < (int64_t)all[i]->rows) return 0;
    }
    return operation->transposed == 1 && a->rows == b->rows && a->columns == d->rows && b->columns == d->columns && c == d;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, const Operation *operation, const Layout *a, const Layout *b,
                                   const Layout *c, const Layout *d, const Preference *preference, int wanted,
                                   Result *results, int *found) {
    uint32_t aligned = 16; /* no more than the rows are */
    for (int i = 0; i < 3; i++) {
        const Layout *one = i == 0 ? a : i == 1 ? b : d;
        while (one->stride * 2 % aligned || one->apart * 2 % aligned) aligned /= 2;
    }
    for (int i = 0; i < 4; i++)
        if (preference->alignments[i] != aligned) return WRONG;
    if (!handle || preference->split_sums != 0 || wanted != 1 || !fit(operation, a, b, c, d)) return WRONG;
    memset(results, 0, sizeof(Result));
    results->algorithm[7] = 1000 + b->columns + (operation->epilogue == 4 ? 1u << 30 : 0);
    *found = 1;
    return OK;
}

int cublasLtMatmul(void *handle, const Operation *operation, const float *alpha, const uint16_t *a, const Layout *as_a,
                   const uint16_t *b, const Layout *as_b, const float *beta, const uint16_t *c, const Layout *as_c,
                   uint16_t *d, const Layout *as_d, const uint64_t *algorithm, void *memory, size_t size, void *stream) {
    uint64_t wanted = 1000 + as_b->columns + (operation->epilogue == 4 ? 1u << 30 : 0);
    if (!handle || !fit(operation, as_a, as_b, as_c, as_d) || algorithm[7] != wanted || memory || size) return WRONG;
    if (*alpha != 1 || *beta != 0 || c != d || stream != (void *)1234 || (operation->epilogue == 4) != !!operation->bias)
        return WRONG;
    for (int matrix = 0; matrix < as_d->count; matrix++, a += as_a->apart, b += as_b->apart, d += as_d->apart)
        for (uint64_t column = 0; column < as_d->columns; column++)
            for (uint64_t row = 0; row < as_d->rows; row++) {
                float sum = 0;
                for (uint64_t i = 0; i < as_a->rows; i++)
                    sum += number(a[row * as_a->stride + i]) * number(b[column * as_b->stride + i]);
                if (operation->bias) sum += number(operation->bias[row]);
                d[column * as_d->stride + row] = rounded(sum);
            }
    return OK;
}
