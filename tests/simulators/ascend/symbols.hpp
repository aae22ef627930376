// Makes this library lack functions, for lookups with dlsym.
#pragma once

namespace simulated_ascend {

// Hides the function of this library from dlsym. False for a name that it does not export.
bool hide_symbol(const char* name);
// Hides the functions that a release of CANN ("8.1", "8.5", "9.0", "9.1") lacks, and shows the
// rest; "" shows everything. False for another word.
bool set_personality(const char* version);
// The release that the library reports, as CANN writes it: "8.1.RC1", "9.1.0".
const char* release();
// Whether that release prints the arguments of kernels (CANN 9.1 and later).
bool has_verbose_json();
bool has_staged_copies();  // an enumerator, not visible as a symbol

}  // namespace simulated_ascend
