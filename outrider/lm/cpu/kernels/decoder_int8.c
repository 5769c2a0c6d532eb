// Compiles decoder.c for bfloat16 with weights in int8.
#define INT8 1
#include "decoder.c"
