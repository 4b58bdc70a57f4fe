#define KVXFER_VECTORS portable_vectors
#define KVXFER_VECTORS_NAME "portable"
#include "cpu/vectors.inl"
