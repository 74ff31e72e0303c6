// Devices of the type "cuda" for a build of torch without CUDA: their tensors are in host memory, and the kernels of
// the CPU compute on them. Operations that a GPU refuses are refused; operations that a GPU ends later end later, by a
// clock of the device that the host runs ahead of. See README.md for the limits, emulated_cuda.py for torch.cuda.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

using Clock = std::chrono::steady_clock;

thread_local c10::DeviceIndex current = 0;
thread_local std::map<int, c10::StreamId> streams;  // current stream by device

int count_devices() {
  const char *visible = std::getenv("CUDA_VISIBLE_DEVICES"), *count = std::getenv("EMULATED_CUDA_DEVICES");
  if (visible && !*visible) return 0;
  return count ? std::atoi(count) : 8;
}
double seconds_per_op() {
  static double value =
      std::getenv("EMULATED_CUDA_US_PER_OP") ? std::atof(std::getenv("EMULATED_CUDA_US_PER_OP")) * 1e-6 : 0.0;
  return value;
}

// --- The clock of each device: a launch adds to the time until which it is busy, and a wait lasts until then ---------
std::mutex lock;
std::map<int, Clock::time_point> busy_until;
std::atomic<int64_t> launched{0}, waited{0}, h2d{0}, d2h{0}, h2d_calls{0}, d2h_calls{0}, allocations{0}, allocated{0},
    peak{0};

void launch(int device, double seconds) {
  launched++;
  if (seconds <= 0) return;
  std::lock_guard<std::mutex> guard(lock);
  auto now = Clock::now();
  auto& until = busy_until[device];
  until = std::max(until, now) + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Copies between the device and pinned memory with non_blocking=True: one to the host writes it at the next wait, and
// memory that one to the device reads must not be rewritten before the next wait.
struct Late {
  void* host;
  std::vector<char> bytes;  // to write into `host`, or the content of `host` when the copy began
  bool to_host;
};
std::vector<Late> late;

void finish_late_locked() {
  for (auto& each : late) {
    if (each.to_host) {
      std::memcpy(each.host, each.bytes.data(), each.bytes.size());
    } else if (std::memcmp(each.host, each.bytes.data(), each.bytes.size()) != 0) {
      late.clear();
      TORCH_CHECK(false, "emulated cuda: pinned memory was written before the non_blocking copy out of it had ended");
    }
  }
  late.clear();
}

void wait_until(Clock::time_point until, bool is_counted = true) {
  waited += is_counted;
  std::this_thread::sleep_until(until);
  std::lock_guard<std::mutex> guard(lock);
  finish_late_locked();
}

void wait_for(int device, bool is_counted = true) {
  Clock::time_point until;
  {
    std::lock_guard<std::mutex> guard(lock);
    until = busy_until[device];
  }
  wait_until(until, is_counted);
}

// --- Memory ----------------------------------------------------------------------------------------------------------
struct Allocator final : c10::Allocator {
  static void free_it(void* pointer) {
    if (!pointer) return;
    auto* base = static_cast<char*>(pointer) - 64;
    allocated -= *reinterpret_cast<int64_t*>(base);
    std::free(base);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    char* base = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(reinterpret_cast<void**>(&base), 64, nbytes + 64) == 0,
                  "emulated cuda: out of memory");
      *reinterpret_cast<int64_t*>(base) = nbytes;
      std::memset(base + 64, 0x7f,
                  std::min<size_t>(nbytes, 1 << 16));  // large numbers, so that nothing relies on zeros
      allocations++;
      int64_t now = allocated += nbytes, before = peak.load();
      while (now > before && !peak.compare_exchange_weak(before, now)) {
      }
      base += 64;
    }
    return {base, base, &free_it, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_it; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
} allocator;

std::set<std::pair<const char*, const char*>> pinned;
struct PinnedAllocator final : c10::Allocator {
  static void free_it(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> guard(lock);
    for (auto it = pinned.begin(); it != pinned.end(); ++it) {
      if (it->first != pointer) continue;
      // As with a caching allocator: no other tensor gets this memory before the copies have ended.
      const char *begin = it->first, *end = it->second;
      late.erase(std::remove_if(late.begin(), late.end(),
                                [&](const Late& each) { return begin <= each.host && each.host < end; }),
                 late.end());
      pinned.erase(it);
      break;
    }
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&pointer, 64, nbytes) == 0, "emulated cuda: out of memory");
      std::lock_guard<std::mutex> guard(lock);
      pinned.insert({static_cast<char*>(pointer), static_cast<char*>(pointer) + nbytes});
    }
    return {pointer, pointer, &free_it, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_it; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
} pinned_allocator;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  for (auto& [begin, end] : pinned)
    if (begin <= pointer && pointer < end) return true;
  return false;
}

// --- Device guard, streams, events and hooks -------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    int index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, device.has_index() ? device.index() : current));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> next{1};
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device.has_index() ? device.index() : current),
                       next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device().index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (!*event) *event = new Clock::time_point();
    *static_cast<Clock::time_point*>(*event) = std::max(busy_until[stream.device().index()], Clock::now());
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return !event || *static_cast<Clock::time_point*>(event) <= Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count_devices(); }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    return busy_until[stream.device().index()] <= Clock::now();
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.device().index()); }
  void synchronizeEvent(void* event) const override {
    wait_until(event ? *static_cast<Clock::time_point*>(event) : Clock::now());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for(device < 0 ? current : device); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto span = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(span).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count_devices() > 0; }
  bool hasCUDA() const override { return count_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex deviceCount() const override { return count_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, current}; }
  int getNumGPUs() const override { return count_devices(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { wait_for(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
};

// --- Tensors ---------------------------------------------------------------------------------------------------------
c10::Device with_index(std::optional<c10::Device> device) {
  auto where = device.value_or(c10::Device(c10::kCUDA, current));
  return where.has_index() ? where : c10::Device(c10::kCUDA, current);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Returns a CPU tensor over the same memory.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  at::Tensor alias = tensor.numel() == 0 || !tensor.storage().data()
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                         : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias = alias.conj();
  return alias;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  at::Tensor to = as_cpu(self), from = as_cpu(src);
  if (src.is_cuda() && self.is_cuda()) {
    launch(self.get_device(), seconds_per_op());
    at::NoGradGuard no;
    to.copy_(from.expand(to.sizes()));
    return self;
  }
  const bool to_host = src.is_cuda();
  const int device = to_host ? src.get_device() : self.get_device();
  const auto& host = to_host ? self : src;
  (to_host ? d2h : h2d) += host.nbytes();
  (to_host ? d2h_calls : h2d_calls)++;
  const bool is_late =
      non_blocking && host.is_contiguous() && host.numel() && self.dtype() == src.dtype() && is_pinned(host.data_ptr());
  at::NoGradGuard no;
  if (!is_late) {  // a copy from pageable memory has at least been staged when it returns
    if (to_host || !non_blocking) wait_for(device);
    launch(device, seconds_per_op());
    to.copy_(from.expand(to.sizes()));
    return self;
  }
  launch(device, seconds_per_op());
  std::lock_guard<std::mutex> guard(lock);
  Late each{host.data_ptr(), std::vector<char>(host.nbytes()), to_host};
  if (to_host) {
    at::Tensor flat = from.contiguous();
    std::memcpy(each.bytes.data(), flat.data_ptr(), each.bytes.size());
  } else {
    std::memcpy(each.bytes.data(), host.data_ptr(), each.bytes.size());
    to.copy_(from.expand(to.sizes()));
  }
  late.push_back(std::move(each));
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  d2h_calls++;
  wait_for(self.get_device());
  return as_cpu(self).item();
}

bool may_mix(const std::string& name) { return name == "aten::_to_copy" || name == "aten::is_pinned"; }

// Runs the CPU's kernel of an operator on the same memory, unless a GPU would refuse its arguments.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), begin = stack->size() - arguments;
  std::optional<c10::Device> device;
  bool has_cpu = false;
  auto see = [&](const at::Tensor& tensor, bool is_index) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      TORCH_CHECK(!device || *device == tensor.device(), schema.name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "!");
      device = tensor.device();
    } else if (tensor.dim() > 0 && !is_index) {
      has_cpu = true;
    }
  };
  for (size_t i = 0; i < arguments; i++) {
    auto& value = (*stack)[begin + i];
    const bool is_index = schema.arguments()[i].name() == "indices";  // a GPU accepts masks and indices on the CPU
    if (value.isTensor())
      see(value.toTensor(), is_index);
    else if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorVector()) see(each, is_index);
    else if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorList())
        if (std::optional<at::Tensor> one = each) see(*one, is_index);
  }
  TORCH_CHECK(!has_cpu || !device || may_mix(schema.name()), schema.name(),
              ": Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and cpu!");
  const c10::Device where = device.value_or(c10::Device(c10::kCUDA, current));
  if (schema.name() == "aten::equal" || schema.name() == "aten::nonzero" || schema.name() == "aten::unique_dim" ||
      schema.name() == "aten::_unique2" || schema.name() == "aten::masked_select")
    wait_for(where.index());  // the host reads the result, or its size
  launch(where.index(), seconds_per_op());
  // A tensor that the operator writes is returned itself, not a copy.
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // a tensor of the device, and the CPU tensor over its memory
  for (size_t i = 0; i < arguments; i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    auto convert = [&](const at::Tensor& tensor) {
      at::Tensor cpu = as_cpu(tensor);
      if (writes && tensor.defined() && tensor.is_cuda()) {
        if (tensor.numel() == 0 || schema.arguments()[i].kwarg_only())  // out= may be resized
          cpu = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
        written.emplace_back(tensor, cpu);
      }
      return cpu;
    };
    if (value.isTensor()) {
      value = c10::IValue(convert(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(convert(each));
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorList()) {
        std::optional<at::Tensor> one = each;
        list.push_back(one && one->defined() ? std::optional<at::Tensor>(convert(*one)) : one);
      }
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_cuda(), schema.name(),
                  ": Expected a 'cuda' device type for generator but found 'cpu'");
      value = c10::IValue();
    }
  }
  op.callBoxed(stack);
  const size_t returns = schema.returns().size(), first = stack->size() - returns;
  auto back = [&](const at::Tensor& cpu) -> at::Tensor {
    if (!cpu.defined() || cpu.is_cuda()) return cpu;
    for (auto& [own, theirs] : written) {
      if (theirs.unsafeGetTensorImpl() == cpu.unsafeGetTensorImpl()) {
        if (own.sizes() != cpu.sizes()) own.resize_(cpu.sizes());
        if (cpu.numel() && cpu.data_ptr() != own.data_ptr()) as_cpu(own).copy_(cpu);
        return own;
      }
    }
    at::Tensor made = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(where));
    if (cpu.numel()) {
      if (cpu.is_non_overlapping_and_dense())
        as_cpu(made).copy_(cpu);
      else
        made.copy_(at::empty(cpu.sizes(), cpu.options()).copy_(cpu));
    }
    return made;
  };
  for (size_t i = 0; i < returns; i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = c10::IValue(back(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(back(each));
      value = c10::IValue(list);
    }
  }
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_",
         [](const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format)
             -> const at::Tensor& { return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format); });
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const int64_t size = source.nbytes() / self.dtype().itemsize();
    return self.set_(source, 0, {size}, {1});
  });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
            c10::SymIntArrayRef stride) -> at::Tensor& {
           return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__),
                                               C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
         });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });
  m.impl("record_stream", &record_stream);
}

// --- Collectives: by gloo, for contiguous tensors of the device alone, as NCCL's -------------------------------------
struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), inner(std::move(gloo)) {}
  const std::string getBackendName() const override { return "emulated_nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    auto part = inner->split(store, ranks, options);
    if (!part) return nullptr;
    return c10::make_intrusive<Collectives>(part, part->getRank(), part->getSize());
  }
  std::atomic<bool> aborted{false};
  void abort() override { aborted = true; }
  at::Tensor own(const at::Tensor& tensor) const {
    TORCH_CHECK(!aborted, "emulated_nccl: NCCL communicator was aborted on rank ", getRank());
    TORCH_CHECK(tensor.is_cuda(), "emulated_nccl: Tensors must be CUDA and dense (as for NCCL)");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "emulated_nccl: Tensors must be contiguous");
    wait_for(tensor.get_device(), false);  // NCCL's collectives do not hold the host up
    at::Tensor alias = as_cpu(tensor);
    return alias;
  }
  std::vector<at::Tensor> own(const std::vector<at::Tensor>& tensors) const {
    std::vector<at::Tensor> made;
    for (auto& each : tensors) made.push_back(own(each));
    return made;
  }
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Done final : c10d::Work {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::vector<at::Tensor> tensors;
    explicit Done(std::vector<at::Tensor> given) : c10d::Work(-1, c10d::OpType::UNKNOWN), tensors(std::move(given)) {
      std::vector<c10::Device> devices;
      if (!tensors.empty()) devices.push_back(tensors[0].device());
      future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      future->markCompleted(c10::IValue(tensors));
    }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
    std::vector<at::Tensor> result() override { return tensors; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  };
  // Waits for gloo's operation. When a rank is gone, gloo raises at once and NCCL waits, until the communicator is
  // aborted; the results are then any numbers.
  Work finish(const Work& work, std::vector<at::Tensor> tensors = {}) const {
    static const bool hangs = std::getenv("EMULATED_NCCL_HANGS") != nullptr;
    try {
      work->wait();
    } catch (const std::exception&) {
      if (!hangs) throw;
      while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  Work broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto a = own(t);
    return finish(inner->broadcast(a, o), t);
  }
  Work allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto a = own(t);
    if (o.reduceOp == c10d::ReduceOp::AVG) {
      auto sum = o;
      sum.reduceOp = c10d::ReduceOp::SUM;
      auto work = finish(inner->allreduce(a, sum), t);
      for (auto& each : a)
        at::isFloatingType(each.scalar_type()) || at::isComplexType(each.scalar_type()) ? each.div_(getSize())
                                                                                        : each.div_(getSize(), "trunc");
      return work;
    }
    return finish(inner->allreduce(a, o), t);
  }
  Work allreduce_coalesced(std::vector<at::Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    Work last;
    for (auto& each : t) {
      std::vector<at::Tensor> one{each};
      c10d::AllreduceOptions options;
      options.reduceOp = o.reduceOp;
      last = allreduce(one, options);
    }
    return last;
  }
  Work reduce(std::vector<at::Tensor>& t, const c10d::ReduceOptions& o) override {
    auto a = own(t);
    return finish(inner->reduce(a, o), t);
  }
  Work allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                 const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> places;
    for (auto& each : out) places.push_back(own(each));
    auto a = own(in);
    return finish(inner->allgather(places, a, o));
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = own(out), b = own(in);
    return finish(inner->_allgather_base(a, b, o));
  }
  Work allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::AllgatherOptions& o) override {
    Work last;
    for (size_t i = 0; i < out.size(); i++) last = _allgather_base(out[i], in[i], o);
    return last;
  }
  Work gather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
              const c10d::GatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> places;
    for (auto& each : out) places.push_back(own(each));
    auto a = own(in);
    return finish(inner->gather(places, a, o));
  }
  Work scatter(std::vector<at::Tensor>& out, std::vector<std::vector<at::Tensor>>& in,
               const c10d::ScatterOptions& o) override {
    auto a = own(out);
    std::vector<std::vector<at::Tensor>> lists;
    for (auto& each : in) lists.push_back(own(each));
    return finish(inner->scatter(a, lists, o));
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    // Not every release of gloo has one: reduces all, and keeps the part of this rank.
    auto a = own(out);
    at::Tensor whole = own(in).clone();
    std::vector<at::Tensor> list{whole};
    c10d::AllreduceOptions options;
    const bool mean = o.reduceOp == c10d::ReduceOp::AVG;
    options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
    auto work = finish(inner->allreduce(list, options));
    if (mean) whole.div_(getSize());
    a.copy_(whole.flatten().narrow(0, getRank() * a.numel(), a.numel()).view(a.sizes()));
    return work;
  }
  Work reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::ReduceScatterOptions& o) override {
    Work last;
    for (size_t i = 0; i < out.size(); i++) last = _reduce_scatter_base(out[i], in[i], o);
    return last;
  }
  Work send(std::vector<at::Tensor>& t, int to, int tag) override {
    auto a = own(t);
    return finish(inner->send(a, to, tag));
  }
  Work recv(std::vector<at::Tensor>& t, int from, int tag) override {
    auto a = own(t);
    return finish(inner->recv(a, from, tag));
  }
  Work barrier(const c10d::BarrierOptions& o) override {
    TORCH_CHECK(!aborted, "emulated_nccl: NCCL communicator was aborted on rank ", getRank());
    wait_for(current);
    c10d::BarrierOptions plain;
    plain.timeout = o.timeout;
    return finish(inner->barrier(plain));
  }
};

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) {
  return c10::make_intrusive<Collectives>(gloo, rank, size);
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
namespace c10d {
struct DeviceTimer final : Timer {  // DistributedDataParallel wants one
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    return from < 0 || to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DeviceTimer);
}  // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator);
  m.def("make_backend", &make_backend, py::call_guard<py::gil_scoped_release>());
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int device) { current = device; });
  m.def("device_count", &count_devices);
  m.def(
      "synchronize", [](int device) { wait_for(device < 0 ? current : device); },
      py::call_guard<py::gil_scoped_release>());
  m.def("launch", [](int device, double seconds) { launch(device < 0 ? current : device, seconds); });
  m.def("busy", [](int device) {
    std::lock_guard<std::mutex> guard(lock);
    return busy_until[device < 0 ? current : device] > Clock::now();
  });
  m.def("moment", [](int device) {
    std::lock_guard<std::mutex> guard(lock);
    return std::chrono::duration<double>(
               std::max(busy_until[device < 0 ? current : device], Clock::now()).time_since_epoch())
        .count();
  });
  m.def("resize_storage", [](at::Storage storage, int64_t nbytes) {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
  });
  m.def("pin", [](int64_t pointer, int64_t nbytes) {
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert({reinterpret_cast<char*>(pointer), reinterpret_cast<char*>(pointer) + nbytes});
  });
  m.def("unpin", [](int64_t pointer) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto it = pinned.begin(); it != pinned.end(); ++it)
      if (it->first == reinterpret_cast<char*>(pointer)) {
        pinned.erase(it);
        break;
      }
  });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{{"launched", launched},
                                          {"waited", waited},
                                          {"h2d", h2d},
                                          {"d2h", d2h},
                                          {"h2d_calls", h2d_calls},
                                          {"d2h_calls", d2h_calls},
                                          {"allocations", allocations},
                                          {"allocated", allocated},
                                          {"peak", peak}};
  });
  m.def("reset_peak", [] { peak = allocated.load(); });
}
