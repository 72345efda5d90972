// A device `cuda:0` for tensors without values, in a build of torch without CUDA.
//
// torch asks a device's guard for the current device and stream, and its hooks whether a GPU exists. These answer, and
// do nothing else, so that shapes, types, devices and the autograd engine behave as on a GPU. No kernel can run.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kKind = c10::DeviceType::CUDA;

class Guard final : public c10::impl::NoOpDeviceGuardImpl<kKind> {
 public:
  c10::Device getDevice() const override { return {kKind, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
};

class CUDAHooks final : public at::CUDAHooksInterface {  // torch looks for this name
 public:
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
