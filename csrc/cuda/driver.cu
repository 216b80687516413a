/* driver.cu: whether this machine's driver can serve, found out before the CUDA runtime is touched.
 *
 * The runtime is linked statically, so this library loads without a driver; with a missing or old one its first call would
 * fail with a number. The driver is asked directly instead, so that the answer names what to install. */
#include <dlfcn.h>

#include "runtime.h"

static_assert(CUDART_VERSION >= 13000, "the runtime of CUDA 13 or later");
#define OLDEST_DRIVER 13000 /* what a CUDA 13 runtime runs on: R580 */

int32_t lm_cuda_driver_check(const lm_host *host) {
  static const char remedy[] = "install NVIDIA driver R580 or later, or use device \"cpu\"";
  /* Never closed: the runtime opens it again. */
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char *reason = dlerror();
    return host->fail(host->owner, LM_ERR_DRIVER, "lm_ctx_open: no CUDA device: the driver does not load: %s: %s",
                      reason ? reason : "libcuda.so.1", remedy);
  }
  int (*get_version)(int *) = reinterpret_cast<int (*)(int *)>(dlsym(library, "cuDriverGetVersion"));
  int found = 0;
  const int error = get_version ? get_version(&found) : -1;
  if (error) {
    return host->fail(host->owner, LM_ERR_DRIVER,
                      "lm_ctx_open: no CUDA device: the driver does not tell its version: error %d: %s", error, remedy);
  }
  if (found >= OLDEST_DRIVER) return LM_OK;
  return host->fail(host->owner, LM_ERR_DRIVER,
                    "lm_ctx_open: no CUDA device: the driver is too old: it supports CUDA %d.%d, this build needs %d.%d: %s",
                    found / 1000, found % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10, remedy);
}
