/* failure.cu: from an error of CUDA to a status and a text.
 *
 * Most errors concern one call and are cleared here: the runtime would hand them to the next launch again. After some, the
 * device's context is lost: every later call of the process fails the same way, so the first is kept and named. */
#include "runtime.h"

static bool loses_the_device(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorDevicesUnavailable:
    case cudaErrorCudartUnloading:
    case cudaErrorContained:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

static int32_t status_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return LM_OK;
    case cudaErrorNotReady:
      return LM_NOT_READY;
    case cudaErrorMemoryAllocation:
      return LM_ERR_OUT_OF_MEMORY;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
      return LM_ERR_NO_DEVICE;
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorInitializationError:
      return LM_ERR_DRIVER;
    case cudaErrorNotSupported:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return LM_ERR_UNSUPPORTED;
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
      return LM_ERR_STATE;
    default:
      return loses_the_device(error) ? LM_ERR_DEVICE : LM_ERR_INTERNAL;
  }
}

static int32_t report(lm_cuda *cuda, cudaError_t error, const char *op) {
  const int32_t status = status_of(error);
  const lm_host *host = &cuda->host;
  if (status != LM_ERR_DEVICE) {
    return host->fail(host->owner, status, "%s: CUDA failed: %s (%s): device=cuda:%d", op, cudaGetErrorString(error),
                      cudaGetErrorName(error), cuda->device);
  }
  const char *first = cuda->runtime ? cuda->runtime->lost_in.load() : NULL;
  return host->fail(host->owner, status,
                    "%s: the device failed: %s (%s): device=cuda:%d, first seen by %s: its memory is lost, start the program "
                    "again",
                    op, cudaGetErrorString(error), cudaGetErrorName(error), cuda->device, first ? first : op);
}

static void note_lost(lm_cuda *cuda, cudaError_t error, const char *op) {
  int32_t none = 0;
  if (!cuda->runtime || !loses_the_device(error)) return;
  if (cuda->runtime->lost.compare_exchange_strong(none, (int32_t)error)) cuda->runtime->lost_in.store(op);
}

int32_t lm_cuda_fail(lm_cuda *cuda, cudaError_t error, const char *op) {
  (void)cudaGetLastError();
  note_lost(cuda, error, op);
  return report(cuda, error, op);
}

int32_t lm_cuda_enter(lm_cuda *cuda, const char *op) {
  const cudaError_t error = cudaSetDevice(cuda->device);
  return error ? lm_cuda_fail(cuda, error, op) : LM_OK;
}

void *lm_cuda_alloc(lm_cuda *cuda, uint64_t bytes, const char *op) {
  void *memory = cuda->host.alloc(cuda->host.owner, bytes);
  if (!memory) {
    cuda->host.fail(cuda->host.owner, LM_ERR_OUT_OF_MEMORY, "%s: out of host memory: %llu bytes of heap", op,
                    (unsigned long long)bytes);
  }
  return memory;
}
