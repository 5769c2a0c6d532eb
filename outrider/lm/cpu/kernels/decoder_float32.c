// Compiles decoder.c for float.
#define BFLOAT16 0
#include "decoder.c"
