// Compiled for AVX-512 F, CD, BW, DQ and VL.
#define KVXFER_VECTORS avx512_vectors
#define KVXFER_VECTORS_NAME "avx512"
#include "cpu/vectors.inl"
