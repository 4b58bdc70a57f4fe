// Devices, memory, events, streams and IPC handles as thin functions: addresses, streams and events are integers, and
// every function returns a cudaError_t (0: done) that the Python side turns into an error. Driver functions are found
// at run time, so the module loads where no driver is; status 35 or 100 then says so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::cuda {

// Makes a device's primary context current for a scope and puts back what was current before. The runtime's own
// cudaSetDevice would, on the way back, create a context on a device that this process never used.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  int status() const { return status_; }

 private:
  int status_;
};

// Loads a kernel onto a device, once: a first launch would load it, and may wait for the device to do so.
int load_kernel(int device, const void* kernel);

const char* error_name(int status);
const char* error_text(int status);

int device_count(int& count);
int current_device(int& device);
int sm_count(int device, int& sms);
int compute_capability(int device, int& major, int& minor);
int can_access_peer(int device, int peer, bool& can);
int enable_peer_access(int device, int peer);  // done already: no error
int driver_version(int& version);

// Device memory of the current device; pinned host memory that every device can address.
int allocate(std::size_t nbytes, std::uint64_t& address);
int release(std::uint64_t address);
int allocate_pinned(std::size_t nbytes, std::uint64_t& address);
int release_pinned(std::uint64_t address);
int pin(std::uint64_t address, std::size_t nbytes);  // host memory that exists already
int unpin(std::uint64_t address);
int device_address_of_pinned(std::uint64_t host, std::uint64_t& address);  // memory that is not pinned: an error

// Between any two of host, device and peer memory. With pageable host memory the call may wait for the copy.
int copy_bytes(std::uint64_t dst, std::uint64_t src, std::size_t nbytes, std::uint64_t stream);
int copy_bytes_peer(std::uint64_t dst, int dst_device, std::uint64_t src, int src_device, std::size_t nbytes,
                    std::uint64_t stream);
// Many copies in one call, in no order among each other. The arrays are read before it returns. `stream` must not be
// the default stream.
int copy_bytes_batch(const std::uint64_t* dst, const std::uint64_t* src, const std::size_t* nbytes, std::size_t count,
                     std::uint64_t stream);
int set_bytes(std::uint64_t dst, int value, std::size_t nbytes, std::uint64_t stream);

int create_stream(int priority, std::uint64_t& stream);  // does not wait for the default stream; lower runs first
int destroy_stream(std::uint64_t stream);
int synchronise_stream(std::uint64_t stream);
int wait_for_event(std::uint64_t stream, std::uint64_t event);

enum EventFlags : unsigned { kTimed = 1, kInterprocess = 2 };
int create_event(unsigned flags, std::uint64_t& event);
int destroy_event(std::uint64_t event);
int record_event(std::uint64_t event, std::uint64_t stream);
int query_event(std::uint64_t event, bool& done);
int synchronise_event(std::uint64_t event);
int elapsed_ms(std::uint64_t begin, std::uint64_t end, float& ms);

constexpr std::size_t kIpcHandleBytes = 64;
int address_range(std::uint64_t address, std::uint64_t& base, std::size_t& nbytes);  // of the whole allocation
int export_memory(std::uint64_t base, std::uint8_t* handle);
int open_memory(const std::uint8_t* handle, std::uint64_t& address);  // on the current device
int close_memory(std::uint64_t address);
int export_event(std::uint64_t event, std::uint8_t* handle);
int open_event(const std::uint8_t* handle, std::uint64_t& event);

}  // namespace kvxfer::cuda
