// A library that clients need by its name and call nothing of.
