/* files.h: the system calls of the file path with failures on request and a log. */
#ifndef LM_SIM_FILES_H
#define LM_SIM_FILES_H

#include <pthread.h>
#include <stdatomic.h>

#include "../core/backend.h"

typedef struct lm_sim_files {
  lm_file_calls calls;
  const lm_file_calls *inner;
  const lm_sim_options *options;
  _Atomic uint64_t count;
  pthread_mutex_t mutex; /* with a log: one call at a time, so that the log has their order */
  int log;               /* descriptor, or -1 */
} lm_sim_files;

/* lm_sim_files_open: inner and options must live as long as files. */
void lm_sim_files_open(lm_sim_files *files, const lm_file_calls *inner, const lm_sim_options *options);
void lm_sim_files_close(lm_sim_files *files);

#endif
