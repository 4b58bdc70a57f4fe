// Compiled for AVX2 and F16C.
#define KVXFER_VECTORS avx2_vectors
#define KVXFER_VECTORS_NAME "avx2"
#include "cpu/vectors.inl"
