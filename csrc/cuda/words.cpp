#include "cuda/words.h"

#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cuda/driver.h"

namespace kvxfer::cuda {
namespace {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "words are shared with the device");

bool reached(std::uint64_t word, std::uint32_t value) {
  const std::uint32_t now = at<const Word*>(word)->load(std::memory_order_acquire);
  return static_cast<std::int32_t>(now - value) >= 0;
}

void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// While it lives, the thread's sleeps end when they should: by default the kernel adds up to 50 us.
class PreciseSleep {
 public:
  PreciseSleep() : slack_(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0); }
  ~PreciseSleep() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_), 0, 0, 0);
  }
  PreciseSleep(const PreciseSleep&) = delete;
  PreciseSleep& operator=(const PreciseSleep&) = delete;

 private:
  int slack_;
};

struct Wait {
  std::uint64_t word;
  std::uint32_t value;
};

void CUDART_CB look_until_reached(void* given) {
  const std::unique_ptr<Wait> wait(static_cast<Wait*>(given));
  while (!reached(wait->word, wait->value)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

int stream_wait_word(std::uint64_t stream, std::uint64_t word, std::uint32_t value) {
  static const DriverFunction<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)> wait("cuStreamWaitValue32",
                                                                                             12000);
  return wait(at<CUstream>(stream), static_cast<CUdeviceptr>(word), cuuint32_t{value},
              static_cast<unsigned>(CU_STREAM_WAIT_VALUE_GEQ));
}

int stream_wait_word_on_host(std::uint64_t stream, std::uint64_t word, std::uint32_t value) {
  auto wait = std::make_unique<Wait>(Wait{word, value});
  const int status = checked(cudaLaunchHostFunc(at<cudaStream_t>(stream), &look_until_reached, wait.get()));
  if (!status) static_cast<void>(wait.release());  // the call frees it
  return status;
}

int stream_write_word(std::uint64_t stream, std::uint64_t word, std::uint64_t value) {
  static const DriverFunction<CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned)> write("cuStreamWriteValue64",
                                                                                              12000);
  return write(at<CUstream>(stream), static_cast<CUdeviceptr>(word), cuuint64_t{value},
               static_cast<unsigned>(CU_STREAM_WRITE_VALUE_DEFAULT));
}

void report_on_host(const Report& report) {
  if (report.lease) {
    at<std::atomic<std::uint64_t>*>(report.seen)->store(at<std::atomic<std::uint64_t>*>(report.lease)->load());
  }
  if (report.gate) at<Word*>(report.gate)->store(report.gate_value);
  if (report.done) at<Word*>(report.done)->store(report.done_value);
}

bool await_word(std::uint64_t word, std::uint32_t value, std::uint32_t spin_us, std::uint32_t doze_us,
                std::uint32_t nap_us) {
  using Clock = std::chrono::steady_clock;
  if (reached(word, value)) return true;
  const auto spin_until = Clock::now() + std::chrono::microseconds(spin_us);
  const auto doze_until = spin_until + std::chrono::microseconds(doze_us);
  while (Clock::now() < spin_until) {
    for (int i = 0; i < 16; ++i) {
      rest();
      if (reached(word, value)) return true;
    }
  }
  const PreciseSleep precise;
  while (Clock::now() < doze_until) {
    std::this_thread::sleep_for(std::chrono::microseconds(nap_us));
    if (reached(word, value)) return true;
  }
  return false;
}

int stream_error(std::uint64_t stream) {
  const int status = checked(cudaStreamQuery(at<cudaStream_t>(stream)));
  return status == cudaErrorNotReady ? static_cast<int>(cudaSuccess) : status;
}

}  // namespace kvxfer::cuda
