// Children that native tests fork.
#pragma once

#include <sys/types.h>
#include <sys/wait.h>

namespace offload::test {

// Waits for a child to end, and returns its exit status; 255 if a signal ended it, or it is no
// child of this process.
inline int status_of(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return 255;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

}  // namespace offload::test
