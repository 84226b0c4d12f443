// "pretend": a device for tests that computes on the CPU, in memory that the CPU cannot read.
//
// It implements torch's interface of a device. Every operation goes through `fallback`, which refuses to mix devices,
// uses the device's random generator, counts the waits of the host, and computes on copies.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>

namespace {

using at::Tensor;
using c10::DeviceIndex;
using torch::jit::Stack;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Memory -------------------------------------------------------------------------------------------------------------

// Offset of every address: no process has memory there, so a read without the device crashes at once.
constexpr uintptr_t kFarAway = uintptr_t{1} << 53;

void* near(const void* far) {
  return far ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(far) - kFarAway) : nullptr;
}

void release(void* far) {
  std::free(near(far));
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    void* memory = std::malloc(bytes);
    TORCH_CHECK(memory, "pretend: out of memory");
    // Uninitialized memory is NaN in every floating point format.
    std::memset(memory, 0xff, bytes);
    void* far = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) + kFarAway);
    return {far, far, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(near(to), near(from), bytes); }
} allocator;

const c10::AllocatorRegisterer<c10::DeviceType::PrivateUse1> registered_allocator(&allocator);

void grow(c10::StorageImpl* storage, size_t bytes) {
  auto grown = allocator.allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes())) allocator.copy_data(grown.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) grow(storage, bytes);
  if (format) tensor->empty_tensor_restride(*format);
  return self;
}

// Waiting for the host -----------------------------------------------------------------------------------------------

std::atomic<int64_t> waits{0};
std::atomic<bool> late{false};
// The copies on which operations compute do not count as waits of the host.
thread_local int inside = 0;

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

std::mutex copies_lock;
std::deque<std::function<void()>> copies;
int64_t copies_made = 0, copies_asked = 0;

void finish() {
  const std::lock_guard<std::mutex> guard(copies_lock);
  for (; !copies.empty(); copies.pop_front(), ++copies_made) copies.front()();
}

void wait() {
  if (inside == 0) ++waits, finish();
}

// The CPU's view of a tensor of the device.
Tensor seen(const Tensor& t) {
  if (t.is_cpu()) return t;
  TORCH_CHECK(t.device() == kDevice, "pretend: copies go to and from the CPU only, not ", t.device());
  auto found = at::from_blob(near(t.const_data_ptr()), t.sizes(), t.strides(), t.options().device(at::kCPU));
  found._set_conj(t.is_conj());
  found._set_neg(t.is_neg());
  return found;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const bool between = self.device() != dst.device();
  const c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
  if (between && non_blocking && late && dst.is_cpu() && inside == 0) {
    const std::lock_guard<std::mutex> guard(copies_lock);
    copies.push_back([dst, now = seen(self).clone()] { Tensor(dst).copy_(now); });
    ++copies_asked;
  } else {
    if (between && !non_blocking) wait();
    seen(dst).copy_(seen(self));
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

// Random numbers -----------------------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  Generator() : GeneratorImpl(kDevice, kKeys) { set_current_seed(c10::default_rng_seed_val); }
  // As on other devices, the same seed gives other numbers than on the CPU.
  void set_current_seed(uint64_t seed) override { seed_ = seed, numbers.set_current_seed(seed ^ 0x5eed); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "pretend: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "pretend: generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator();
    other->seed_ = seed_;
    other->numbers = numbers.clone();
    return other;
  }

  at::Generator numbers = at::detail::createCPUGenerator();

 private:
  uint64_t seed_ = 0;
};

const at::Generator& default_generator() {
  static const at::Generator made = at::make_generator<Generator>();
  return made;
}

at::Generator numbers_of(const c10::IValue& given) {
  const auto generator = given.isNone() ? default_generator() : given.toGenerator();
  TORCH_CHECK(generator.device().is_privateuseone(), "Expected a 'pretend' device type for generator but found '",
              generator.device(), "'");
  return generator.get<Generator>()->numbers;
}

// Operations ---------------------------------------------------------------------------------------------------------

bool is_mask(const c10::IValue& given) {
  if (!given.isList()) return false;
  for (const c10::IValue& one : given.toListRef())
    if (one.isTensor() && one.toTensor().defined() && (one.toTensor().scalar_type() == at::kBool)) return true;
  return false;
}

bool is_on_the_cpu(const Tensor& t) {
  return t.defined() && t.is_cpu();
}

// As on a GPU, elementwise operations accept scalars on the CPU. Indexing accepts indices on the CPU, and the host
// waits while they are copied.
void refuse_mixed(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given) {
  const std::string& name = op.schema().name();
  const bool picks = name.find("index") != std::string::npos;
  const bool by_element = picks || op.hasTag(at::Tag::pointwise) || name == "aten::fill_" || name == "aten::masked_fill" ||
      name == "aten::masked_fill_";
  for (const auto& one : given) {
    if (one.isTensor()) {
      const auto& t = one.toTensor();
      TORCH_CHECK(!is_on_the_cpu(t) || (by_element && t.dim() == 0), name,
                  ": Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu!");
    } else if (one.isList()) {
      for (const c10::IValue& part : one.toListRef()) {
        if (!part.isTensor() || !is_on_the_cpu(part.toTensor())) continue;
        TORCH_CHECK(picks, name,
                    ": Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu!");
        wait();
      }
    }
  }
}

bool host_waits(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given) {
  // For a mask, torch has called `nonzero` before, which waits.
  if (op.schema().name() == "aten::index") return false;
  if (op.schema().name().find("index") != std::string::npos)
    return std::any_of(given.begin(), given.end(), is_mask);
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  refuse_mixed(op, given);
  if (host_waits(op, given)) wait();
  const Inside now;
  bool draws = !op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    auto& place = (*stack)[stack->size() - arguments.size() + i];
    place = numbers_of(place);
    draws = true;
  }
  TORCH_CHECK(draws, "pretend: ", op.schema().name(), " would draw from the CPU's random numbers");
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

c10::OperatorHandle found(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = found("aten::convolution");
  fallback(op, stack);
}

// The general operation also takes the sizes of the bias.
void convolution_backward(const c10::OperatorHandle& given, Stack* stack) {
  static const auto op = found("aten::convolution_backward");
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(given.schema().arguments().size());
  const auto weight = begin[2].toTensor();
  const bool transposed = begin[6].toBool();
  const int64_t groups = begin[8].toInt();
  stack->insert(begin + 3, std::vector<int64_t>{transposed ? weight.size(1) * groups : weight.size(0)});
  fallback(op, stack);
}

// The device itself --------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return copies.empty(); }
  void synchronizeStream(const c10::Stream&) const override { wait(); }
  void synchronizeDevice(const DeviceIndex) const override { wait(); }
  // An event is complete when all earlier copies are made.
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t;
    *static_cast<int64_t*>(*event) = copies_asked;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return !event || *static_cast<int64_t*>(event) <= copies_made; }
  void synchronizeEvent(void*) const override { wait(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Without `override`, since versions of torch differ in the methods of the interface.
#pragma GCC diagnostic ignored "-Wsuggest-override"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
  DeviceIndex deviceCount() const { return 1; }
  void setCurrentDevice(DeviceIndex) const {}
  DeviceIndex getCurrentDevice() const { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const { return at::make_generator<Generator>(); }
  at::Allocator* getPinnedMemoryAllocator() const { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view", &at::native::view);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_BY_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_BY_OPTION)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace at::autocast

TORCH_LIBRARY(pretend, m) {
  m.def("waits() -> int", [] { return waits.load(); });
  m.def("make_copies_late(bool late) -> ()", [](bool now) { late = now, finish(); });
  m.def("synchronize() -> ()", [] { wait(); });
  m.def("seed(int seed) -> ()", [](int64_t seed) { at::Generator(default_generator()).set_current_seed(seed); });
  m.def("random_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_random_state(Tensor state) -> ()", [](const Tensor& state) { at::Generator(default_generator()).set_state(state); });
}
