// libacl_mdl.so of a split runtime (CANN 8.5 and later): offline models, implemented by the other
// library under names that end in Impl. CMake writes the list, from split_functions.txt.
#if defined(__x86_64__)
#define JUMP "jmp "
#define BEHIND "@PLT"
#elif defined(__aarch64__)
#define JUMP "b "
#define BEHIND ""
#else
#error "no jump is known for this processor"
#endif

#define OFFLOAD_FORWARD(name)                                                               \
  asm(".globl " #name "\n.type " #name ", @function\n" #name ":\n" JUMP #name "Impl" BEHIND \
      "\n.size " #name ", . - " #name "\n");

asm(".text\n");
#include "split_functions.inc"
