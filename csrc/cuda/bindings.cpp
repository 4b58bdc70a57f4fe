// The Python face of csrc/cuda: integers in, a CUDA status out (alone, or first in a tuple). kvxfer/cuda raises the
// errors. Importing touches no driver.
#include "cuda/bindings.h"

NB_MODULE(_cuda, m) {
  nanobind::set_leak_warnings(false);  // threads may hold plans when Python ends
  kvxfer::cuda::bind_device(m);
  kvxfer::cuda::bind_sharing(m);
  kvxfer::cuda::bind_move(m);
  kvxfer::cuda::bind_convert(m);
}
