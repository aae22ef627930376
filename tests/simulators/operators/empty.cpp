// A library that clients need by name, without calling it.
