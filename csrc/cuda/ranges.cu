/* ranges.cu: ranges of addresses whose pages come and go, through the driver's virtual memory management.
 *
 * The driver is not linked: its functions are asked for by name, so that the library loads where there is none. Each page is
 * an allocation of its own, so that any of them can go alone; the mapping keeps it, its handle is given up at once. */
#include <cuda.h>

#include "runtime.h"

typedef unsigned long long ull;

#define SPACE 8 /* addresses of a range: times the memory of the device, where there are as many */

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

struct driver {
  decltype(&cuDeviceGetAttribute) get_attribute;
  decltype(&cuMemGetAllocationGranularity) get_granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  bool complete;
};

template <typename Function>
static bool find(const char *name, Function *function) {
  void *found = NULL;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error) (void)cudaGetLastError();
  *function = reinterpret_cast<Function>(found);
  return !error && result == cudaDriverEntryPointSuccess && found;
}

static driver find_all(void) {
  driver d = {};
  d.complete = find("cuDeviceGetAttribute", &d.get_attribute) && find("cuMemGetAllocationGranularity", &d.get_granularity) &&
               find("cuMemAddressReserve", &d.reserve) && find("cuMemAddressFree", &d.free) && find("cuMemCreate", &d.create) &&
               find("cuMemRelease", &d.release) && find("cuMemMap", &d.map) && find("cuMemUnmap", &d.unmap) &&
               find("cuMemSetAccess", &d.set_access);
  return d;
}

static const driver &functions(void) {
  static const driver found = find_all();
  return found;
}

static CUmemAllocationProp page_of(const lm_cuda *cuda) {
  CUmemAllocationProp page = {};
  page.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  page.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  page.location.id = cuda->device;
  return page;
}

/* The numbers of the driver's errors are those of the runtime. */
static int32_t fail(lm_cuda *cuda, CUresult result, const char *op) {
  return lm_cuda_fail(cuda, static_cast<cudaError_t>(result), op);
}

static bool can_map(lm_cuda *cuda) {
  const driver &d = functions();
  const CUmemAllocationProp page = page_of(cuda);
  int supported = 0;
  size_t granularity = 0;
  return d.complete && !d.get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, cuda->device) &&
         supported && !d.get_granularity(&granularity, &page, CU_MEM_ALLOC_GRANULARITY_MINIMUM) && granularity &&
         LM_RANGE_PAGE % granularity == 0;
}

void *lm_cuda_range_reserve(lm_backend *base, uint64_t *bytes) {
  static const char op[] = "lm_pool_create";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  if (!can_map(cuda)) {
    cuda->host.fail(cuda->host.owner, LM_ERR_UNSUPPORTED, "%s: cuda:%d cannot map memory page by page", op, cuda->device);
    return NULL;
  }
  CUdeviceptr memory = 0;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  for (uint64_t pages = cuda->properties.totalGlobalMem / LM_RANGE_PAGE * SPACE; result && pages >= 32; pages /= 2) {
    *bytes = (pages & ~UINT64_C(1)) * LM_RANGE_PAGE;
    result = functions().reserve(&memory, *bytes, LM_RANGE_PAGE, 0, 0);
  }
  if (result) fail(cuda, result, op);
  return result ? NULL : reinterpret_cast<void *>(memory);
}

int32_t lm_cuda_range_commit(lm_backend *base, void *memory, uint64_t bytes) {
  static const char op[] = "lm_pool_alloc";
  lm_cuda *cuda = self(base);
  const driver &d = functions();
  int32_t status = lm_cuda_enter(cuda, op);
  if (status) return status;
  const CUdeviceptr begin = reinterpret_cast<CUdeviceptr>(memory);
  const CUmemAllocationProp page = page_of(cuda);
  CUresult result = CUDA_SUCCESS;
  uint64_t mapped = 0;
  while (!result && mapped < bytes) {
    CUmemGenericAllocationHandle handle;
    result = d.create(&handle, LM_RANGE_PAGE, &page, 0);
    if (result) break;
    result = d.map(begin + mapped, LM_RANGE_PAGE, 0, handle, 0);
    (void)d.release(handle);
    if (!result) mapped += LM_RANGE_PAGE;
  }
  CUmemAccessDesc access = {};
  access.location = page.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (!result) result = d.set_access(begin, bytes, &access, 1);
  if (!result) return LM_OK;
  if (mapped) (void)d.unmap(begin, mapped);
  if (result != CUDA_ERROR_OUT_OF_MEMORY) return fail(cuda, result, op);
  size_t free_bytes = 0, total_bytes = 0;
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  return cuda->host.fail(cuda->host.owner, LM_ERR_OUT_OF_MEMORY,
                         "%s: out of device memory: requested=%llu free=%llu total=%llu on cuda:%d: ask for less", op, (ull)bytes,
                         (ull)free_bytes, (ull)total_bytes, cuda->device);
}

void lm_cuda_range_decommit(lm_backend *base, void *memory, uint64_t bytes) {
  static const char op[] = "lm_pool_trim";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return;
  const CUresult result = functions().unmap(reinterpret_cast<CUdeviceptr>(memory), bytes);
  if (result) (void)lm_cuda_fail(cuda, static_cast<cudaError_t>(result), op);
}

void lm_cuda_range_release(lm_backend *base, void *memory, uint64_t bytes) {
  static const char op[] = "lm_pool_destroy";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return;
  const CUresult result = functions().free(reinterpret_cast<CUdeviceptr>(memory), bytes);
  if (result) (void)lm_cuda_fail(cuda, static_cast<cudaError_t>(result), op);
}
