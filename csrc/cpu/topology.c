/* topology.c: how many cores this process may use.
 * A container's share shows in two places: the affinity mask, and the CPU quota of its cgroup (v2 cpu.max, v1 cfs files).
 * Hyper-threads share the vector units that these kernels keep busy, so only one thread of a core counts. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "threads.h"

/* first_sibling: lowest allowed hyper-thread of the core that `cpu` belongs to. */
static int first_sibling(int cpu, const cpu_set_t *allowed) {
  char path[96];
  snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
  FILE *file = fopen(path, "r");
  if (file == NULL) return cpu;
  int first = cpu, low, high; /* the list reads like 0,64 or 0-1 */
  while (fscanf(file, "%d", &low) == 1) {
    high = low;
    int separator = fgetc(file);
    if (separator == '-') {
      if (fscanf(file, "%d", &high) != 1) break;
      separator = fgetc(file);
    }
    for (int i = low; i <= high && i < CPU_SETSIZE; i++)
      if (i >= 0 && CPU_ISSET(i, allowed) && i < first) first = i;
    if (separator != ',') break;
  }
  fclose(file);
  return first;
}

/* read_pair: two numbers "quota period" of a file; a quota of "max" reads as none. */
static int read_pair(const char *path, double *quota, double *period) {
  FILE *file = fopen(path, "r");
  if (file == NULL) return 0;
  const int found = fscanf(file, "%lf %lf", quota, period);
  fclose(file);
  return found;
}

/* quota_at: cores granted by the cgroup folder, or `limit` if it grants more. */
static double quota_at(const char *folder, double limit) {
  char path[640];
  double quota = 0, period = 0;
  snprintf(path, sizeof path, "%s/cpu.max", folder);
  if (read_pair(path, &quota, &period) != 2) {
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (read_pair(path, &quota, &period) < 1) return limit;
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    double ignored;
    if (read_pair(path, &period, &ignored) < 1) return limit;
  }
  return quota > 0 && period > 0 && quota / period < limit ? quota / period : limit;
}

/* cgroup_limit: the smallest quota from the process's own cgroup up to the root, in both hierarchies. */
static double cgroup_limit(double limit) {
  FILE *file = fopen("/proc/self/cgroup", "r");
  if (file == NULL) return limit;
  char line[512];
  while (fgets(line, sizeof line, file) != NULL) { /* "0::/path" or "7:cpu,cpuacct:/path" */
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':');
    char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (path == NULL) continue;
    *path++ = 0;
    controllers++;
    const int unified = controllers[0] == 0;
    int cpu = 0;
    for (char *rest = controllers, *name; (name = strtok_r(rest, ",", &rest)) != NULL;) cpu |= strcmp(name, "cpu") == 0;
    if (!unified && !cpu) continue;
    for (;;) {
      char folder[600];
      snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s", unified ? "" : "/cpu", path);
      limit = quota_at(folder, limit);
      char *slash = strrchr(path, '/');
      if (slash == NULL || path[0] == 0) break;
      *slash = 0;
    }
  }
  fclose(file);
  return limit;
}

int32_t lm_cpu_available(void) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  int32_t cores = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &allowed) && first_sibling(cpu, &allowed) == cpu) cores++;
  const double limit = cgroup_limit(cores);
  const int32_t granted = (int32_t)(limit + 0.999);
  return granted < 1 ? 1 : granted;
}
