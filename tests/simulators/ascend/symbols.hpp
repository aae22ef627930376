// Makes this library one that lacks functions, for whoever asks with dlsym.
#pragma once

namespace simulated_ascend {

// dlsym no longer finds the function in this library. False for a name that it does not export.
bool hide_symbol(const char* name);
// Hides what a release of CANN ("8.1", "8.5", "9.0", "9.1") lacks, and shows the rest; "" shows
// everything. False for another word.
bool set_personality(const char* version);
// The release that the library says it is of, as CANN writes it: "8.1.RC1", "9.1.0".
const char* release();
// Whether that release prints the arguments of kernels (CANN 9.1 and later).
bool has_verbose_json();
bool has_staged_copies();  // an enumerator, which no symbol tells

}  // namespace simulated_ascend
