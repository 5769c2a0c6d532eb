// Calls functions of a kernel library for a process on another architecture; see arm_processor.py.
//
// Each request on stdin has a header, memory, and the places of pointers in it. The response on
// stdout is the result and the memory's first part, which the function may have written.
#include <dlfcn.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// `name`: the function, or a constant int64_t if `is_call` is 0. `integers` has what goes to the
// integer registers. An integer whose bit is set in `pointers` is a pointer, given as an offset in
// the memory. The memory has `sent` bytes from the request and `room` more; `written` bytes of it
// go back.
struct request {
  char name[64];
  int64_t is_call, threads, sent, room, written, relocations, pointers, integers[8];
  double number;
};

// Integer arguments and float arguments are passed in separate registers, so this type also calls
// functions with fewer arguments.
typedef int64_t function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         float);

static void must(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "arm_server: %s\n", what);
  exit(1);
}

static int64_t answer(void *symbol, const struct request *request, char *memory) {
  int64_t at[8];
  if (!request->is_call) return *(const int64_t *)symbol;
  for (int i = 0; i < 8; i++)
    at[i] = request->integers[i] + (request->pointers >> i & 1 ? (int64_t)memory : 0);
  omp_set_num_threads((int)request->threads);
  return ((function *)symbol)(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7],
                              (float)request->number);
}

int main(int count, char **arguments) {
  must(count == 2, "usage: arm_server LIBRARY");
  void *library = dlopen(arguments[1], RTLD_NOW);
  must(library != NULL, dlerror());
  struct request request;
  while (fread(&request, sizeof request, 1, stdin) == 1) {
    void *symbol = dlsym(library, request.name);
    must(symbol != NULL, request.name);
    size_t sent = (size_t)request.sent, size = sent + (size_t)request.room;
    char *memory = aligned_alloc(64, (size + 64) / 64 * 64);
    must(memory != NULL, "no memory");
    must(fread(memory, 1, sent, stdin) == sent, "the request ended early");
    // Bytes of 0xff are NaN as float and as bfloat16. So a result shows whether the function read
    // memory that nobody wrote.
    memset(memory + sent, 0xff, size - sent);
    for (int64_t i = 0; i < request.relocations; i++) {
      int64_t pair[2];  // where a pointer lies, and where it points to
      must(fread(pair, sizeof pair, 1, stdin) == 1, "the request ended early");
      char *target = memory + pair[1];
      memcpy(memory + pair[0], &target, sizeof target);
    }
    int64_t result = answer(symbol, &request, memory);
    must(fwrite(&result, sizeof result, 1, stdout) == 1, "cannot answer");
    must(fwrite(memory, 1, (size_t)request.written, stdout) == (size_t)request.written,
         "cannot answer");
    must(fflush(stdout) == 0, "cannot answer");
    free(memory);
  }
  return 0;
}
